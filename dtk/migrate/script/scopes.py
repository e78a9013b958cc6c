"""The strategy of a script, and scopes around the models that it compiles."""

from __future__ import annotations

import itertools
import re

import libcst as cst
from libcst import matchers as m

from dtk.migrate.script.source import OWN, Source, argument, assigned, code, method

_STRATEGY = re.compile(r"tensorflow\.(\w+\.)*distribute\.(\w+\.)*\w+Strategy$")
_PLAIN = m.SimpleStatementLine(
    body=[m.OneOf(m.Assign(targets=[m.AssignTarget()]), m.Expr(m.Call(func=m.Attribute())))]
)
_IMPORT = m.SimpleStatementLine(body=[m.OneOf(m.Import(), m.ImportFrom())])
_TEXT = m.SimpleStatementLine(body=[m.Expr(m.SimpleString())])
_KERAS_2 = re.compile(
    r"\b((fit|evaluate|predict)_generator|ImageDataGenerator|optimizers\.legacy\.\w+|multi_gpu_model"
    r"|ConfigProto|losses\.Reduction\.\w+|reset_states)$"
)


def rewrite(source: Source, made: cst.CSTNode | None, line: str) -> None:
    """Make a strategy by a line, if the script makes none, and compile in its scope."""
    _Scopes(source, made).rewrite(line)


class _Scopes:
    def __init__(self, source: Source, made: cst.CSTNode | None) -> None:
        self.source, self.made, self.strategy = source, made, source.strategy
        for one in source.find(cst.SimpleStatementLine):
            name, value = assigned(one)
            called = source.imported(value.func) if isinstance(value, cst.Call) else ""
            if self.made is None and _STRATEGY.match(called):
                self.made, self.strategy = one, name
        self.home = source.function(self.made) if self.made is not None else None
        self.inside: set[cst.CSTNode] = set()
        runs = [one for one in source.calls if method(one) == "run" and one.args]
        ran = {code(one.args[0].value) for one in runs if not source.imported(one.func)}
        self.steps = source.steps | ran

    def rewrite(self, line: str) -> None:
        source = self.source
        trains = False
        for call in source.calls:
            if self._compiles(call):
                self._want(call)
            elif method(call) == "apply_gradients" and source.steps:
                self._want_parts(call)
            self._check(call)
            trains |= self._compiles(call) or method(call) == "apply_gradients"
        for node in [one for one in self.inside if self._is_early(one)]:
            self.inside.remove(node)
            source.mark(
                node, f"`{self.strategy}` is made later; move this into its scope", "scopes"
            )
        for block in [source.module, *source.find(cst.IndentedBlock)]:
            for inside, group in itertools.groupby(_body(block), lambda one: one in self.inside):
                left = [one for one in group if one not in source.deleted]
                if inside and left:
                    first = source.line(left[0])
                    source.insert(first, f"{source.margin(first)}with {self.strategy}.scope():\n")
                    source.indent(first, source.end(left[-1]), 1)
        if trains or self.made is not None:
            self._import(line)

    def _compiles(self, call: cst.Call) -> bool:
        """Whether a call compiles a model, or loads a compiled one."""
        if code(call.func).split(".")[-1] == "load_model":
            return code(argument(call, "compile")) != "False"
        owner = call.func.value if isinstance(call.func, cst.Attribute) else None
        if method(call) != "compile" or owner is None or not call.args:
            return False
        return not self.source.imported(owner) and code(owner) != "super()"

    def _is_scoped(self, node: cst.CSTNode) -> bool:
        blocks = [one for one in self.source.parents(node) if isinstance(one, cst.With)]
        return any(code(item.item).endswith(".scope()") for one in blocks for item in one.items)

    def _want(self, call: cst.Call) -> None:
        """Put a call into the scope, and what makes its model if that is beside it.

        A function that compiles is left alone if the script calls it in a scope.
        """
        source, function = self.source, self.source.function(call)
        name = function.name.value if function is not None else ""
        callers = [one for one in source.calls if name and code(one.func) == name]
        outside = [one for one in callers if not self._is_scoped(one)]
        if self._is_scoped(call) or (callers and not outside):
            return
        if callers and self.made is not None and self.home is None:
            self.inside |= {source.statement(one) for one in outside}
            return
        line = source.statement(call)
        self.inside.add(line)
        before = itertools.takewhile(lambda one: one is not line, _body(next(source.parents(line))))
        beside = list(itertools.takewhile(self._is_plain, reversed(list(before))))
        model = code(call.func).removesuffix(".compile")
        makes = [place for place, one in enumerate(beside) if assigned(one)[0] == model]
        self.inside |= set(beside[: makes[0] + 1] if makes else [])

    def _want_parts(self, applied: cst.Call) -> None:
        """Put the optimizer and the model of a step into the scope."""
        names = {one.value for one in self.source.find(cst.Name, applied)}
        lines = self.source.find(cst.SimpleStatementLine)
        homes = (None, self.home)
        made = [o for o in lines if assigned(o)[0] in names and self.source.function(o) in homes]
        for body in {_body(next(self.source.parents(one))) for one in made}:
            places = [place for place, one in enumerate(body) if one in made]
            between = body[places[0] : places[-1] + 1]
            self.inside |= set(between if all(map(self._is_plain, between)) else made)

    def _is_plain(self, line: cst.CSTNode) -> bool:
        """Whether a line assigns or calls a method, and neither trains nor makes the strategy."""
        trains = {"fit", "evaluate", "predict"} & {
            method(call) for call in self.source.find(cst.Call, line)
        }
        return m.matches(line, _PLAIN) and not trains and line is not self.made

    def _is_early(self, node: cst.CSTNode) -> bool:
        """Whether a statement runs where the strategy is not made, as far as the script shows."""
        if self.made is None or (self.source.function(node) and self.home is None):
            return False
        seen = self.home is None or self.home in self.source.parents(node)
        late = self.source.line(node) > self.source.line(self.made)
        return not (late and seen and self.strategy.isidentifier())

    def _check(self, call: cst.Call) -> None:
        """Mark loops that are not distributed, and what Keras 3 has no more."""
        source, text = self.source, code(call.func)
        ups = [one.name.value for one in source.parents(call) if isinstance(one, cst.FunctionDef)]
        if method(call) == "apply_gradients" and not {*self.steps, "train_step"} & set(ups):
            source.mark(call, f"a loop of your own: call its step by {self.strategy}.run", "loops")
        used = [text, *(code(one.value) for one in call.args)]
        match = next(filter(None, map(_KERAS_2.search, used)), None)
        if match and source.statement(call) not in source.deleted:
            source.mark(call, f"Keras 3 has no `{match[0]}`", "keras-2")
        if argument(call, "lr") and "optimizers." in f"{text} {source.imported(call.func)}":
            source.mark(call, "Keras 3 calls `lr` learning_rate", "keras-2")
        if method(call) == "set_memory_growth" and source.statement(call) not in source.deleted:
            message = "too late after the strategy: dtk.auto_strategy(memory_growth=True)"
            source.mark(call, message, "scopes")

    def _import(self, line: str) -> None:
        """Import dtk before Keras, and make the strategy after the imports."""
        source, body = self.source, self.source.module.body
        places = [one for one in body if "__future__" not in code(one)]
        imports = [one for one in places if m.matches(one, _IMPORT)]
        keras = [one for one in imports if re.search(r"\b(keras|tensorflow|horovod)", code(one))]
        places = keras or imports or [one for one in places if not m.matches(one, _TEXT)]
        first = body.index(places[0])
        run = itertools.takewhile(lambda one: m.matches(one, _IMPORT | _TEXT), body[first:])
        last = [source.end(one) for one in run if one in imports]
        top = source.line([*getattr(places[0], "decorators", ()), places[0]][0])
        source.insert(top, "import dtk\n", OWN)
        if self.made is None:
            source.insert(last[-1] if last else top, f"\n{line}\n" + "\n" * (not last), OWN)


def _body(block: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    return tuple(block.body) if isinstance(block, cst.Module | cst.IndentedBlock) else ()
