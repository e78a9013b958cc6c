"""Horovod's names in a script.

    Horovod, on each of N ranks                 dtk, on each of N ranks
    batch_size=B, rows of this rank             batch_size=B * strategy.size, rows of all ranks
    Dataset.shard(N, rank).batch(B)             Dataset.batch(B * strategy.size)
    rate * N                                    rate * strategy.size
    rate * N and a warm-up callback             rate and LearningRateScaling, which multiplies it
    S // N steps of an epoch                    S // strategy.size
    E / N epochs, every rank reads all rows     E epochs, each over all rows once
    optimizer wrapped, weights broadcast        compiled in a scope

A step so sees the rows and the rate that it saw under Horovod.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

import libcst as cst
from libcst import matchers as m

from dtk.migrate.script.source import Source, alone, argument, assigned, code, method

_PREFIX = re.compile(r"horovod\.(tensorflow\.keras|tensorflow|keras)\.")
# Lines that choose a GPU by rank, and lines that go with them.
_PINS = re.compile(
    r"(set_visible_devices|visible_device_list|CUDA_VISIBLE_DEVICES).*local_rank\(\)"
)
_GPU_LINES = re.compile(
    r"[\w.]*\b(set_visible_devices|set_memory_growth|set_session)\(|\w+\.gpu_options\."
    r"|os\.environ\[.CUDA_VISIBLE_DEVICES.\] = "
)
_GPU_NAMES = re.compile(r"\w+ = [\w.]*\b(list_physical_devices|ConfigProto)\(|(if|for) .*:$|#")
# Arguments of DistributedOptimizer that do not change what the optimizer gets.
_NEEDLESS = re.compile(
    r"(name|device_\w+|sparse_as_dense|num_groups|groups|average_aggregated_gradients) ?="
    r"|backward_passes_per_step ?= ?1$|op ?= ?\w+\.Average$|compression ?= ?\w+\.Compression\.none$"
)
# Callbacks of Keras that every rank may have: those that write do so on rank 0.
_OF_ALL_RANKS = re.compile(
    r"\w+\.append\([\w.]*\b(ModelCheckpoint|TensorBoard|CSVLogger|BackupAndRestore|EarlyStopping"
    r"|ReduceLROnPlateau|LearningRateScheduler|TerminateOnNaN)\("
)
# Calls that make batches of rows.
_BATCHES = {"batch", "padded_batch", "ragged_batch"}
# Calls that all ranks make together, and how some leave before them.
_TOGETHER = {"fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"}
_LEAVES = re.compile(r"(^|[:;])\s*(return|raise|break|continue)\b|\b_?(exit|quit)\(", re.MULTILINE)
# What counts epochs, apart from `epochs` and a warm-up.
_EPOCHS = re.compile(
    r"\b(EarlyStopping|ReduceLROnPlateau|LearningRateSchedule\w*|on_epoch_\w+|initial_epoch"
    r"|validation_freq)\b"
)
# What may differ by rank: what is printed, compared or part of a name.
_TOLD = m.OneOf(
    *(m.FormattedString(), m.Comparison(), m.BinaryOperation(m.SimpleString(), m.Modulo())),
    m.Call(func=m.MatchIfTrue(lambda f: bool(re.search(r"\b(print|format|info|str)$", code(f))))),
)
# Functions of one argument: what stands there instead, and after the argument.
_FUNCTIONS = {
    "allreduce": ("{strategy}.communicator.allreduce", ', "mean"'),
    "allgather": ("{strategy}.communicator.allgather", ""),
    "callbacks.BroadcastGlobalVariablesCallback": ("dtk.callbacks.BroadcastVariables", ""),
}
_CURES = {
    "run": "`dtk run -n 2 SCRIPT` starts ranks",
    "elastic": "dtk.callbacks.Checkpoint resumes, and `dtk run --max-restarts` starts again",
    "callbacks": "write one of dtk.callbacks, or Keras's LearningRateScheduler",
    "join": "all ranks of dtk take as many steps",
    "broadcast_variables": "`fit` sends rank 0's weights; elsewhere read them on every rank",
}


def rewrite(source: Source) -> tuple[cst.CSTNode | None, bool]:
    """Replace Horovod's names; mark what is left.

    Returns:
        The line that makes the strategy, if it is one of the script's, and whether the script let
        GPU memory grow.
    """
    return _Horovod(source).rewrite()


class _Horovod:
    def __init__(self, source: Source) -> None:
        self.source, self.text, self.strategy = source, source.text, source.strategy
        shard = r"\.shard\(\s*(num_shards ?= ?)?\w+\.size\(\),\s*(index ?= ?)?\w+\.rank\(\)"
        self.sharded = re.search(shard, self.text) is not None
        self.named = [(call, self.name(call)) for call in source.calls]
        self.divided = False  # whether epochs were divided by the ranks, and are no more
        blocks: list[cst.If | cst.IfExp] = [*source.find(cst.If), *source.find(cst.IfExp)]
        self.ranked = [one for one in blocks if self.is_of_rank(one.test)]
        read = r"\.(restore|load_weights|read)\("
        self.restores = any(re.search(read, source.code(one)) for one in self.ranked)
        homes = [source.function(call) for call in source.calls if method(call) in _TOGETHER]
        self.together = _TOGETHER | {one.name.value for one in homes if one is not None}

    def name(self, call: cst.CSTNode | None) -> str:
        """Return the name within Horovod of what is called; empty if it is none of Horovod's."""
        full_name = self.source.imported(call.func) if isinstance(call, cst.Call) else ""
        return _PREFIX.sub("", full_name) if _PREFIX.match(full_name) else ""

    def is_chief(self, test: cst.CSTNode) -> bool:
        """Whether an expression is `hvd.rank() == 0`."""
        compared = isinstance(test, cst.Comparison) and self.name(test.left) == "rank"
        return compared and code(test).endswith(") == 0")

    def is_of_rank(self, test: cst.CSTNode) -> bool:
        """Whether an expression, or what it names, asks for the rank."""
        named = [*self.source.find(cst.Name, test), *self.source.find(cst.Attribute, test)]
        shown = [test, *(one for name in named for one in self.source.assignments(code(name)))]
        calls = [call for one in shown for call in self.source.find(cst.Call, one)]
        return any(self.name(call).endswith("rank") for call in calls)

    def rewrite(self) -> tuple[cst.CSTNode | None, bool]:
        source = self.source
        for block in self.ranked:
            self._of_ranks(block)
        for condition in source.find(cst.If):
            self._of_chief(condition)
        for test in source.find(cst.Comparison):
            if self.is_chief(test):
                source.write(test, f"{self.strategy}.is_chief")
        for node in source.find(cst.IfExp):
            parent = next(source.parents(node))
            told = isinstance(parent, cst.Arg | cst.Assign) and code(parent).startswith("verbose")
            if told and self.is_chief(node.test):
                source.keep(node, node.body)
                source.note("Keras prints on rank 0 only, whatever `verbose` is")
        growth = self._gpu_lines()
        made = self._strategy_line(growth)
        for call in source.calls:
            if method(call) in ("fit", "fit_generator"):
                self._fit(call)
        for call, name in self.named:
            self._call(call, name, method(call))
        self._rest()
        return made, growth

    def _strategy_line(self, growth: bool) -> cst.CSTNode | None:
        """Make the strategy in the place of `hvd.init()`, if all that needs it sees it there."""
        lines = [self.source.statement(call) for call, name in self.named if name == "init"]
        home = self.source.function(lines[0]) if lines else None
        inside = [c for c, name in self.named if name or method(c) in ("compile", "load_model")]
        seen = home is None or all(home in self.source.parents(call) for call in inside)
        in_place = len(lines) == 1 and seen
        for line in lines:
            if isinstance(alone(line), cst.Expr):
                margin = self.source.margin(self.source.line(line))
                made = f"{margin}{strategy_line(self.strategy, growth)}\n" if in_place else ""
                self.source.delete(line, made)
        return lines[0] if in_place and lines[0] in self.source.deleted else None

    def _gpu_lines(self) -> bool:
        """Delete lines that choose a GPU; return whether they let its memory grow."""
        if not _PINS.search(self.text):
            return False
        lines = [one.strip() for one in self.text.split("\n")]
        for line in self.source.find(cst.SimpleStatementLine):
            text = self.source.code(line)
            name = re.escape(text.partition(" ")[0])
            using = [one for one in lines if re.search(rf"\b{name}\b", one)]
            goes = all(_GPU_NAMES.match(one) or _GPU_LINES.match(one) for one in using)
            if alone(line) is None:
                continue
            if _GPU_LINES.match(text) or (_GPU_NAMES.match(text) and goes):
                self.source.delete(line)
        return re.search("set_memory_growth|allow_growth", self.text) is not None

    def _of_chief(self, block: cst.If) -> None:
        """Give every rank the callbacks that it may have."""
        body = block.body if self.is_chief(block.test) and block.orelse is None else None
        lines = list(body.body) if isinstance(body, cst.IndentedBlock) else []
        if lines and all(_OF_ALL_RANKS.match(self.source.code(one)) for one in lines):
            self.source.note("callbacks of Keras write on rank 0 only; every rank gets them")
            self.source.unwrap(block, lines[-1])

    def _of_ranks(self, block: cst.If | cst.IfExp) -> None:
        """Mark what some ranks do or do not get to, and all ranks must do."""
        source = self.source
        calls = source.find(cst.Call, block)
        if _LEAVES.search(source.code(block)):  # then others of these ranks' loops and lines count
            loops = [one for one in source.parents(block) if isinstance(one, cst.For | cst.While)]
            first = min([source.span(block)[1], *(source.span(one)[0] for one in loops)])
            after = source.find(cst.Call, source.function(block))
            calls += [call for call in after if source.span(call)[0] >= first]
        for name in sorted(self.together & {code(call.func).split(".")[-1] for call in calls}):
            message = f"`{name}` is of all ranks, and not all get to it: call it on each"
            source.mark(block, message, "ranks-that-differ")

    def _is_needless(self, call: cst.Call, name: str) -> bool:
        """Whether it is a broadcast or callback that does what dtk does anyway."""
        root = argument(call, "root_rank", int(name == "broadcast_variables"))
        broadcast = name.rsplit(".")[-1].lower().startswith(("broadcast_", "broadcastglobal"))
        if name == "callbacks.MetricAverageCallback":
            self.source.note("metrics are those of all ranks' rows without a callback")
            return True
        if name == "shutdown":
            return True
        if not broadcast or code(root) != "0" or "object" in name:
            return False
        self.source.note("all ranks start from rank 0's weights by themselves")
        return "callbacks" in name or not self.restores

    def _call(self, call: cst.Call, name: str, kind: str) -> None:
        """Replace a call of Horovod's; make a batch global."""
        source, line = self.source, self.source.statement(call)
        only, element = alone(line), next(source.parents(call))
        is_line = isinstance(only, cst.Expr) and (
            only.value is call or code(only).endswith(f".append({code(call)})")
        )
        if name in ("rank", "size", "local_rank", "local_size"):
            within = "communicator.local_size" if name == "local_size" else name
            source.write(call, f"{self.strategy}.{within}")
            self._check_rank(call, name)
        elif is_line and self._is_needless(call, name):
            source.delete(line)
        elif isinstance(element, cst.Element) and self._is_needless(call, name):
            source.delete_element(element)
        elif name in ("DistributedOptimizer", "DistributedGradientTape") and call.args:
            self._unwrap_optimizer(call, line)
            if name == "DistributedGradientTape":
                self._loop(source.function(call))
        elif name == "callbacks.LearningRateWarmupCallback":
            self._warm_up(call)
        elif name in _FUNCTIONS and len(call.args) == 1:
            function, last = _FUNCTIONS[name]
            source.write(call.func, function.format(strategy=self.strategy))
            end = source.span(call)[1] - 1
            source.replace(end, end, last)
        elif kind == "shard" and {self.name(arg.value) for arg in call.args} == {"size", "rank"}:
            source.keep(call, cst.ensure_type(call.func, cst.Attribute).value)
            self._check_shard(call)
        elif kind in _BATCHES and isinstance(call.func, cst.Attribute) and call.args:
            rows = argument(call, "batch_size", 0)
            if rows is not None and source.dataset(call.func.value):
                self._times_size(call, rows)
            else:
                message = f"if these are rows of one rank, write them times {self.strategy}.size"
                source.mark(call, message, "batches-and-epochs")
        old = [arg for arg in call.args if code(arg).startswith("experimental_run_tf_function")]
        for arg in old if kind == "compile" else ():
            source.delete_element(arg)

    def _check_rank(self, call: cst.Call, name: str) -> None:
        blocks = cst.BaseSuite | cst.Module
        ups = itertools.takewhile(lambda up: not isinstance(up, blocks), self.source.parents(call))
        allowed = _TOLD if name == "rank" else m.Comparison()
        told = [
            up for up in ups if m.matches(up, allowed | m.Call(m.Attribute(attr=m.Name("shard"))))
        ]
        if "rank" in name and not told:
            why = "ranks differ here; seeds and data must be the same on all ranks"
            self.source.mark(call, why, "ranks-that-differ")

    def _check_shard(self, call: cst.Call) -> None:
        around = {method(one) for one in self.source.parents(call) if isinstance(one, cst.Call)}
        if {"take", "skip"} & around:
            why = "`take` and `skip` counted rows of one rank; with dtk, of all ranks"
            self.source.mark(call, why, "batches-and-epochs")
        self.source.note(
            "dtk gives each rank its rows of every batch, so shards go (dtk.data.shard where "
            "reading is too slow)"
        )

    def _unwrap_optimizer(self, call: cst.Call, line: cst.CSTNode) -> None:
        source, inner = self.source, call.args[0].value
        target, value = assigned(line)
        texts = [code(arg).rstrip(", ") for arg in call.args[1:]]
        changing = [text for text in texts if not _NEEDLESS.match(text)]
        for text in changing:
            source.mark(call, f"{text} is left out: dtk has this elsewhere", "other-names")
        if value is call and target == code(inner) and not changing:
            source.delete(line)
        else:
            source.keep(call, inner)

    def _loop(self, step: cst.FunctionDef | None) -> None:
        """Call a step of the script's own by `strategy.run`, if what ranks make of it adds up."""
        source, name = self.source, step.name.value if step is not None else ""
        taken = [c for c in source.find(cst.Call, step) if method(c) == "gradient" and c.args]
        sites = [call for call in source.calls if name and code(call.func) == name]
        if step is None or len(taken) != 1 or not sites:
            return
        loops = [self._loop_over_dataset(call) for call in sites]
        rules = self._rules_of_step(step, taken[0])
        place = f"`{name}(...)` needs a loop over a dataset with a known batch, and no keywords"
        rules[place] = None not in loops and not any(arg.keyword for c in sites for arg in c.args)
        for rule in [rule for rule, is_kept in rules.items() if not is_kept]:
            source.mark(taken[0], f"not called by {self.strategy}.run: {rule}", "loops")
        if not all(rules.values()):
            return
        for call in sites:
            run = f'{self.strategy}.reduce("SUM", {self.strategy}.run({name}, args='
            source.write(call.func, run)
            end = source.span(call)[1]
            single = [arg.comma for arg in call.args] == [cst.MaybeSentinel.DEFAULT]
            source.replace(end - 1, end, f"{',' * single})), axis=None)")
        for over in {one for one in loops if one is not None}:
            source.around(over, f"{self.strategy}.experimental_distribute_dataset(", ")")
        source.steps.add(name)
        source.note(
            "a step of your own is called by strategy.run: gradients are summed over the ranks, "
            "and Keras divides its loss by their number"
        )

    def _rules_of_step(self, step: cst.FunctionDef, taken: cst.Call) -> dict[str, bool]:
        """Return what must hold of a step and its call of `gradient`, and whether it does.

        Keras divides its loss by the ranks, and gradients and losses are summed over them: those of
        one rank are parts, of which nothing else in the step may make use.
        """
        source, loss = self.source, code(taken.args[0].value)
        target, value = assigned(source.statement(taken))
        gradients = target if value is taken else source.code(taken)
        applied = rf"\.apply_gradients\(\s*zip\(\s*{re.escape(gradients)}\s*,"
        uses = Counter(one.value for one in source.find(cst.Name, step))
        once = uses[gradients] == 2 * gradients.isidentifier()
        returned = [code(one.value) for one in source.find(cst.Return, step)]
        shown = [one for one in source.assignments(loss) if source.function(one) is step]
        made = [code(source.resolved(one.func)) for one in shown if isinstance(one, cst.Call)]
        keras = re.compile(r"[\w.]*\blosses\.[A-Z]\w+\((?!.*reduction)", re.DOTALL)
        apply = once and re.search(applied, source.code(step)) is not None
        only = f"`{loss}` may be made in one line, differentiated and returned, and no more"
        return {
            f"one of Keras's losses must return `{loss}`": any(map(keras.match, made)),
            only: returned == [loss] and uses[loss] == 3,
            "only `apply_gradients(zip(...))` may use the gradients": apply,
        }

    def _loop_over_dataset(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the batched dataset that the loop around a call goes over."""
        for loop in self.source.parents(call):
            over = loop.iter if isinstance(loop, cst.For) else None
            if isinstance(over, cst.Call) and code(over.func) == "enumerate":
                over = over.args[0].value
            if _BATCHES & self.source.dataset(over):
                return over
        return None

    def _warm_up(self, call: cst.Call) -> None:
        """Let LearningRateScaling multiply the rate, if the script shows which one it is."""
        source, rate = self.source, argument(call, "initial_lr", 0)
        product = source.resolved(rate)
        same = [*source.find(cst.Name), *source.find(cst.BinaryOperation)]
        uses = [one for one in same if code(one) == code(rate)]
        uses = [one for one in uses if not isinstance(next(source.parents(one)), cst.AssignTarget)]
        taken = [one for one in uses if self._is_of_optimizer(one)]
        known = product is not None and self._kept(product, cst.Multiply)
        if product is None or not known or not len(taken) == len(uses) - 1 > 0:
            return
        for each in {product, *uses}:
            self._drop_size(each, cst.Multiply)
        epochs = argument(call, "warmup_epochs", 1)
        scaling = "dtk.callbacks.LearningRateScaling(warmup_epochs="
        factor = f"{self.strategy}.size"
        if epochs is None:
            source.write(call, f"{scaling}5{f' * {factor}' * self.divided})")
        else:
            source.keep(call, epochs, scaling, ")")
            if self.divided:
                source.multiply(epochs, factor)
        source.note(
            "LearningRateScaling multiplies the rate by the ranks in its warm-up; the script's own "
            "rate is that of one rank"
        )

    def _is_of_optimizer(self, node: cst.CSTNode) -> bool:
        call = next((one for one in self.source.parents(node) if isinstance(one, cst.Call)), None)
        called = call.func if call is not None else node
        return "optimizers." in f"{code(called)} {self.source.imported(called)}"

    def _kept(self, node: cst.CSTNode, *kinds: type[cst.BaseBinaryOp]) -> cst.BaseExpression | None:
        """Return what `hvd.size()` multiplies or divides; None if it does not."""
        if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, kinds):
            return None
        if self.name(node.right) == "size":
            return node.left
        turned = self.name(node.left) == "size" and isinstance(node.operator, cst.Multiply)
        return node.right if turned else None

    def _drop_size(self, node: cst.CSTNode, *kinds: type[cst.BaseBinaryOp]) -> None:
        if (kept := self._kept(node, *kinds)) is not None:
            self.source.keep(node, kept)

    def _times_size(self, call: cst.Call, rows: cst.BaseExpression | None) -> None:
        factor = f"{self.strategy}.size"
        self.source.note(
            f"a batch was one rank's, and is now the global batch: times {factor}, so that a step "
            "sees as many rows as before"
        )
        if rows is not None:
            self.source.multiply(rows, factor)
            return
        end = self.source.span(call.args[-1])[1]
        self.source.replace(end, end, f", batch_size=32 * {factor}")

    def _fit(self, call: cst.Call) -> None:
        """Make the batch of `fit` global, and its epochs passes; mark what is not shown."""
        source, rows, x = self.source, argument(call, "batch_size", 2), argument(call, "x", 0)
        if self._is_of_script(call):
            return
        if rows is not None or argument(call, "y", 1) is not None:
            self._times_size(call, rows)
        elif not _BATCHES & source.dataset(x):
            told = f"batches must have the rows of all ranks: one rank's times {self.strategy}.size"
            source.mark(call, told, "batches-and-epochs")
        if argument(call, "steps_per_epoch") is None and not self.sharded:
            epochs = source.resolved(argument(call, "epochs", 3)) or call.func
            parts = source.find(cst.BinaryOperation, epochs)
            fits = [one for one in source.calls if method(one) == "fit"]
            alike = all(argument(one, "steps_per_epoch") is None for one in fits)
            divided = [one for one in parts if self._kept(one, cst.Divide, cst.FloorDivide)]
            for one in divided if alike else ():
                self._drop_size(one, cst.Divide, cst.FloorDivide)
                self.divided = True
            counted = sorted({match[0] for match in _EPOCHS.finditer(self.text)})
            if not divided or not alike or counted:
                told = "where each rank read all rows, an epoch was that many passes; it is one now"
                told += "".join(f", also for `{one}`" for one in counted)
                source.mark(call, told, "batches-and-epochs")

    def _is_of_script(self, call: cst.Call) -> bool:
        """Return whether the script shows that a method is a class's of its own."""
        assert isinstance(call.func, cst.Attribute)
        made = self.source.resolved(call.func.value)
        name = code(made.func) if isinstance(made, cst.Call) else ""
        classes = [one for one in self.source.find(cst.ClassDef) if one.name.value == name]
        methods = [one.name.value for c in classes for one in self.source.find(cst.FunctionDef, c)]
        return call.func.attr.value in methods

    def _rest(self) -> None:
        """Mark names that are left, and remove imports that nothing needs."""
        source = self.source
        source.delete_emptied()
        imports: list[cst.Import | cst.ImportFrom] = source.find(cst.Import)
        imports += source.find(cst.ImportFrom)
        used = set()
        for node in [*source.find(cst.Name), *source.find(cst.Attribute)]:
            parents = list(source.parents(node))
            full = source.imported(node)
            inside = any(isinstance(one, cst.Import | cst.ImportFrom) for one in parents)
            if not full.startswith("horovod") or inside or source.is_edited(node):
                continue
            used.add(code(node).split(".")[0])
            if not isinstance(parents[0], cst.Attribute):
                name = _PREFIX.sub("", full).removeprefix("horovod.")
                cure = _CURES.get(name.split(".")[0], "dtk has this elsewhere, or not")
                source.mark(node, f"Horovod's `{name}`: {cure}", "other-names")
        for one in [one for one in imports if "horovod" in code(one)]:
            aliases = () if isinstance(one.names, cst.ImportStar) else one.names
            local = {a.evaluated_alias or a.evaluated_name.split(".")[0] for a in aliases}
            ours = isinstance(one, cst.ImportFrom) or all("horovod" in code(a) for a in aliases)
            if not aliases or not ours or local & used:
                source.mark(one, "remove this with the last line of Horovod", "other-names")
            else:
                source.delete(source.statement(one))


def strategy_line(name: str, memory_growth: bool) -> str:
    """Return the statement that makes the strategy."""
    return f"{name} = dtk.auto_strategy({'memory_growth=True' * memory_growth})"
