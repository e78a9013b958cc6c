"""`dtk migrate`: what it changes, what it marks, and what it leaves alone."""

from __future__ import annotations

import ast
import stat
import textwrap

import click.testing
import numpy as np
import pytest

from dtk.cli.main import main
from dtk.migrate.script import migrate

from support.launched import dtk_run

KERAS = """
    import keras
    import numpy as np

    x = np.ones((8, 3))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=4)
"""
HOROVOD = """
    import keras
    import numpy as np
    import tensorflow as tf
    import horovod.keras as hvd

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(48, 3))
    y = x.sum(axis=1, keepdims=True)
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), dense])
    # Horovod: as fast as there are ranks
    optimizer = keras.optimizers.SGD(0.05 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Average)
    model.compile(optimizer, "mse")
    callbacks = [
        # Horovod: all begin alike
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),  # and tell the same
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint("best.keras"))
    model.fit(
        x, y, batch_size=4, epochs=6 // hvd.size(), callbacks=callbacks,
        shuffle=False, verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        print([float(w) for w in model.get_weights()[0][:, 0]])
"""
# What becomes of it, line by line.
MOVED = """
    import dtk
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = dtk.auto_strategy()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(48, 3))
    y = x.sum(axis=1, keepdims=True)
    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense])
        # Horovod: as fast as there are ranks
        optimizer = keras.optimizers.SGD(0.05 * strategy.size)
        model.compile(optimizer, "mse")
    callbacks = []
    callbacks.append(keras.callbacks.ModelCheckpoint("best.keras"))
    model.fit(
        x, y, batch_size=4 * strategy.size, epochs=6, callbacks=callbacks,
        shuffle=False, verbose=2,
    )
    if strategy.is_chief:
        print([float(w) for w in model.get_weights()[0][:, 0]])
"""


def text_of(script):
    return textwrap.dedent(script).lstrip()


def migrated(script):
    """The migrated script, and the reasons of its marks."""
    found = migrate(text_of(script).encode())
    return found.text.decode(), [why for _, why in found.marks]


def hvd(*lines):
    """A script of Horovod's with some lines at its end."""
    names = "horovod.tensorflow.keras as hvd", "tensorflow as tf", "keras"
    return "\n".join([*(f"import {name}" for name in names), "hvd.init()", *lines])


def last(script):
    """The last line that `dtk migrate` makes of a script without marks."""
    text, marks = migrated(script)
    assert not marks, marks
    return text.strip().splitlines()[-1]


def test_plain_keras():
    text, marks = migrated(KERAS)
    assert not marks
    assert text.startswith(
        "import dtk\nimport keras\nimport numpy as np\n\nstrategy = dtk.auto_str"
    )
    assert "with strategy.scope():\n    model = keras.Sequential(" in text
    assert '\n    model.compile("sgd", "mse")\nmodel.fit(x, x[:, :1], batch_size=4)' in text


def test_a_fit_of_the_scripts_own_stays():
    """Its third argument was taken for a batch size."""
    lines = ["class Trainer:", "    def fit(self, x, y, xv):", "        m.fit(x, y, 16)"]
    after, _ = migrated(hvd(*lines, "t = Trainer()", "t.fit(x, y, x[:8])"))
    assert "t.fit(x, y, x[:8])" in after and "m.fit(x, y, 16 * strategy.size)" in after


def test_the_strategy_is_made_before_its_scope():
    """Lines of one place came in the order of a set, another with each seed of hashes."""
    for length in range(9):
        comment = f"#{' ' * length}x\n"
        text, _ = migrated(f"{comment}import keras\nm = keras.Sequential()\nm.compile('sgd')\n")
        assert text == (
            f"{comment}import dtk\nimport keras\n\nstrategy = dtk.auto_strategy()\n"
            "with strategy.scope():\n    m = keras.Sequential()\n    m.compile('sgd')\n"
        )


def test_imports_that_are_no_statements_of_the_module():
    made = "import dtk\n\nstrategy = dtk.auto_strategy()\n\n"
    main = "def main():\n    import keras\n    m.compile('sgd')\nmain()\n"
    guard = "try:\n    import keras\nexcept ImportError:\n    raise\nm.compile('sgd')\n"
    text = '"""What it does."""\nfrom __future__ import annotations\n# so\n'
    for before, script in (("", main), ("", guard), (text, main), (text, f"@decorated\n{main}")):
        moved, marks = migrated(before + script)
        assert moved.startswith(f"{before}{made}{script.splitlines()[0]}\n") and not marks
        assert "with strategy.scope():\n" in moved
        compile(moved, "train.py", "exec")


def test_horovod():
    text, marks = migrated(HOROVOD)
    assert not marks
    assert text == text_of(MOVED)


def test_a_migrated_script_is_left_alone():
    for script in (KERAS, HOROVOD, MOVED):
        once = migrate(text_of(script).encode())
        twice = migrate(once.text)
        assert twice.text == once.text and twice.is_done and "dtk already" in twice.refusal


@pytest.mark.parametrize(
    "line, becomes",
    [
        ("f(hvd.size(), hvd.local_size())", "f(strategy.size, strategy.communicator.local_size)"),
        ("a = hvd.allreduce(b)", 'a = strategy.communicator.allreduce(b, "mean")'),
        ("print('of %d' % hvd.rank())", "print('of %d' % strategy.rank)"),
        (
            "d = tf.data.Dataset.range(9).batch(a + b)",
            "d = tf.data.Dataset.range(9).batch((a + b) * strategy.size)",
        ),
        (
            "d = tf.data.Dataset.range(9).padded_batch(4, shapes)",
            "d = tf.data.Dataset.range(9).padded_batch(4 * strategy.size, shapes)",
        ),
        (
            "d = tf.data.Dataset.range(9).map(f).ragged_batch(batch_size=n)",
            "d = tf.data.Dataset.range(9).map(f).ragged_batch(batch_size=n * strategy.size)",
        ),
        (
            "d = tf.data.Dataset.range(9).shard(hvd.size(), hvd.rank()).batch(n)",
            "d = tf.data.Dataset.range(9).batch(n * strategy.size)",
        ),
        ("steps = 500 // hvd.size()", "steps = 500 // strategy.size"),
        (
            "m.fit(x, y, steps_per_epoch=9)",
            "m.fit(x, y, steps_per_epoch=9, batch_size=32 * strategy.size)",
        ),
        (
            "o = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), name='o')",
            "o = keras.optimizers.SGD(0.1)",
        ),
        (
            "c = [hvd.callbacks.BroadcastGlobalVariablesCallback(1)]",
            "c = [dtk.callbacks.BroadcastVariables(1)]",
        ),
    ],
)
def test_lines_of_horovod(line, becomes):
    assert last(hvd("m.compile('sgd')", line)) == becomes


def test_a_warm_up_takes_the_ranks_out_of_the_rate():
    rate = "rate = 0.1 * hvd.size()"
    warm_up = "c = [hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3)]"
    text, marks = migrated(hvd(rate, "o = keras.optimizers.SGD(rate)", "m.compile(o)", warm_up))
    assert "rate = 0.1\n" in text and "[dtk.callbacks.LearningRateScaling(warmup_epochs=3)]" in text
    assert not marks
    # Another use of the rate: which one is to be multiplied is for the user to say.
    text, marks = migrated(hvd(rate, "o = keras.optimizers.SGD(rate)", "g(rate)", warm_up))
    assert "rate = 0.1 * strategy.size" in text and "LearningRateWarmupCallback(" in text
    assert any("LearningRateWarmupCallback" in why for why in marks)


def test_a_rate_that_is_divided_is_not_taken_for_one_that_is_multiplied():
    warm_up = "c = [hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 / hvd.size())]"
    text, marks = migrated(hvd("o = keras.optimizers.SGD(0.1 / hvd.size())", warm_up))
    assert text.count("0.1 / strategy.size") == 2 and marks


def test_other_statements_of_a_line_stay():
    text, marks = migrated("import horovod.keras as hvd, os\nhvd.init(); x = 1\nm.compile(o)\n")
    assert text.startswith("import dtk\n# dtk migrate: remove this with the last line of Horovod")
    assert "\nimport horovod.keras as hvd, os\n" in text
    assert "hvd.init(); x = 1\n" in text and len(marks) == 2


def test_line_ends_and_coding_stay():
    script = text_of(KERAS).replace("import numpy", "# \u00e9\nimport numpy")
    before = f"# coding: latin-1\r\n{script}".replace("\n", "\r\n").replace("\r\r", "\r")
    after = migrate(before.encode("latin-1")).text.decode("latin-1")
    assert "# \u00e9\r\n" in after and "import dtk\r\nimport keras\r\n" in after
    assert after.count("\n") == after.count("\r\n")


def loop(
    *,
    optimizer="SGD(0.1)",
    loss=(),
    gradients=(),
    result="value",
    rows=".batch(8)",
    call="step(x, y)",
):
    """A script with a step of its own; lines after the loss, and after the gradients."""
    return hvd(
        "loss = keras.losses.MeanSquaredError()",
        "model = make()",
        f"opt = keras.optimizers.{optimizer}",
        "def step(x, y):",
        "    with tf.GradientTape() as tape:",
        "        value = loss(y, model(x))",
        *(f"        {line}" for line in loss),
        "    tape = hvd.DistributedGradientTape(tape)",
        "    grads = tape.gradient(value, model.trainable_variables)",
        *(f"    {line}" for line in gradients),
        "    opt.apply_gradients(zip(grads, model.trainable_variables))",
        f"    return {result}",
        f"data = tf.data.Dataset.from_tensor_slices(rows){rows}",
        "for x, y in data.take(9):",
        f"    print({call})",
    )


def test_a_loop_of_horovods():
    text, marks = migrated(loop())
    assert not marks
    assert "in strategy.experimental_distribute_dataset(data.take(9)):" in text
    assert 'print(strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None))' in text
    assert (
        "with strategy.scope():\n    model = make()\n    opt = keras.optimizers.SGD(0.1)\n" in text
    )


def test_calls_of_a_step_stay_calls():
    gradient = "tape.gradient(value, model.trainable_variables)"
    direct = loop(call="step(*batch)").replace(f"    grads = {gradient}\n", "")
    direct = direct.replace("zip(grads,", f"zip({gradient},")
    for script, arguments in (
        (loop(call="step(x)"), "(x,)"),
        (loop(call="step(x,)"), "(x,)"),
        (direct, "(*batch,)"),
    ):
        text, marks = migrated(script)
        assert f"strategy.run(step, args={arguments}), axis=None)" in text and not marks


@pytest.mark.parametrize(
    "other, why",
    [
        # A penalty counted once for each rank.
        ({"loss": ["value += penalty(model)"]}, "`value` may be made in one line"),
        ({"loss": ["value = value + penalty(model)"]}, "`value` may be made in one line"),
        ({"loss": ["value, other = value * 2, 1"]}, "`value` may be made in one line"),
        # Each rank's part was clipped, not the sum.
        ({"gradients": ["grads = [clip(g) for g in grads]"]}, "may use the gradients"),
        ({"gradients": ["metric(value)"]}, "`value` may be made in one line"),
        ({"result": "value, norm(grads)"}, "`value` may be made in one line"),
        ({"result": "None"}, "`value` may be made in one line"),
        ({"rows": ""}, "a dataset with a known batch"),
        ({"call": "step(x, y=y)"}, "no keywords"),
    ],
)
def test_a_loop_whose_parts_do_not_add_up_is_left_alone(other, why):
    text, marks = migrated(loop(**other))
    assert any("not called by strategy.run: " in mark and why in mark for mark in marks), marks
    assert "strategy.run(" not in text and "experimental_distribute_dataset" not in text


def test_a_loss_of_a_call_that_returns_more_is_none_of_kerass():
    script = loop().replace("value = loss(y, model(x))", "value, other = f(y, model(x))")
    assert any("one of Keras's losses must return `value`" in why for why in migrated(script)[1])


@pytest.mark.parametrize(
    "given, warm_up",
    [
        (", warmup_epochs=3", "3 * strategy.size"),
        (", warmup_epochs=a - b", "(a - b) * strategy.size"),
        (", warmup_epochs=6 // hvd.size()", "(6 // strategy.size) * strategy.size"),
        ("", "5 * strategy.size"),
    ],
)
def test_a_warm_up_takes_as_many_steps_when_epochs_are_no_longer_divided(given, warm_up):
    def lines(epochs):
        return hvd(
            "rate = 0.1 * hvd.size()",
            "m.compile(keras.optimizers.SGD(rate))",
            f"c = [hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate{given})]",
            f"m.fit(x, y, callbacks=c, epochs={epochs})",
        )

    text, marks = migrated(lines("9 // hvd.size()"))
    assert f"LearningRateScaling(warmup_epochs={warm_up})]" in text and not marks
    text, marks = migrated(lines("9, steps_per_epoch=4"))
    shown = warm_up.removesuffix(" * strategy.size").strip("()")
    assert f"LearningRateScaling(warmup_epochs={shown})]" in text and not marks


@pytest.mark.parametrize(
    "given, counted",
    [
        ("callbacks=[keras.callbacks.EarlyStopping(patience=3)]", "EarlyStopping"),
        ("callbacks=[keras.callbacks.LearningRateScheduler(f)]", "LearningRateScheduler"),
        ("callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=f)]", "on_epoch_end"),
        ("validation_freq=2", "validation_freq"),
    ],
)
def test_what_else_counts_epochs_is_marked(given, counted):
    _, marks = migrated(hvd(f"m.fit(x, y, epochs=6 // hvd.size(), {given})"))
    assert len(marks) == 1 and f"it is one now, also for `{counted}`" in marks[0]
    _, marks = migrated(hvd(f"m.fit(x, y, epochs=6, steps_per_epoch=3, {given})"))
    assert not marks


@pytest.mark.parametrize(
    "lines",
    [
        ["if not hvd.rank():", "    m.evaluate(x)"],
        ["if verbose and hvd.rank() == 0:", "    m.evaluate(x)"],
        ["chief = hvd.rank() == 0", "if chief:", "    m.evaluate(x)"],
        ["self.rank = hvd.rank()", "if self.rank == 0:", "    m.evaluate(x)"],
        ["if hvd.rank() > 0:", "    pass", "else:", "    m.evaluate(x)"],
        ["score = m.evaluate(x) if hvd.local_rank() == 0 else None"],
        ["if hvd.rank() != 0:", "    raise SystemExit", "m.evaluate(x)"],
        ["if hvd.rank() != 0: sys.exit(0)", "m.evaluate(x)"],
        ["for x in y:", "    m.evaluate(x)", "    if hvd.rank() == 0 and x:", "        break"],
        ["def f():", "    if hvd.rank() != 0:", "        return", "    m.evaluate(x)"],
    ],
)
def test_calls_of_all_ranks_that_some_do_not_get_to(lines):
    _, marks = migrated(hvd(*lines))
    assert any("`evaluate` is of all ranks" in why for why in marks), marks
    # So it is of a function that makes the call.
    lines = [line.replace("m.evaluate(x)", "score(x)") for line in lines]
    _, marks = migrated(hvd("def score(x):", "    return m.predict_on_batch(x)", *lines))
    assert any("`score` is of all ranks" in why for why in marks), marks


@pytest.mark.parametrize(
    "lines",
    [
        ["if hvd.rank() == 0:", "    m.save(x)", "m.evaluate(x)"],
        ["m.evaluate(x)", "if hvd.rank() != 0:", "    raise SystemExit", "m.save(x)"],
        ["def f():", "    if hvd.rank() != 0:", "        return", "    m.save(x)", "m.evaluate(x)"],
    ],
)
def test_calls_that_all_ranks_get_to(lines):
    assert not migrated(hvd(*lines))[1]


@pytest.mark.parametrize(
    "lines, why",
    [
        (["np.random.seed(1 + hvd.rank() % 2)"], "seeds and data must be the same"),
        (["m.fit(tf.data.Dataset.range(9).map(f), steps_per_epoch=3)"], "rows of all ranks"),
        (["keras.utils.set_random_seed(7 + hvd.rank())"], "seeds and data must be the same"),
        (["x = load(hvd.rank(), hvd.size())"], "seeds and data must be the same"),
        (["d = tf.data.Dataset.range(9).batch(*n)"], "if these are rows of one rank"),
        (["d = load().batch(8)"], "if these are rows of one rank"),
        (["m.fit(load(), steps_per_epoch=3)"], "batches must have the rows of all ranks"),
        (["m.fit(x, y, epochs=3)"], "an epoch was that many passes"),
        (["m.fit(x, y, epochs=3 * hvd.size())"], "an epoch was that many passes"),
        (["tf.device(f'/gpu:{hvd.local_rank()}')"], "ranks differ here"),
        (
            ["d = tf.data.Dataset.range(9).shard(hvd.size(), hvd.rank()).take(3)"],
            "counted rows of one",
        ),
        (["if hvd.rank() == 0:", "    m.evaluate(x, y)"], "call it on each"),
        (["o = hvd.DistributedOptimizer(o, backward_passes_per_step=4)"], "=4 is left out"),
        (["hvd.join()"], "Horovod's `join`"),
        (["a = hvd.allreduce(b, op=hvd.Sum)"], "Horovod's `allreduce`"),
        (
            ["if hvd.rank() == 0:", "    c.restore(p)", "hvd.broadcast_variables(v, root_rank=0)"],
            "read them on every",
        ),
        (
            ["def s(t):", "    t = hvd.DistributedGradientTape(t)", "    o.apply_gradients(t)"],
            "by strategy.run",
        ),
        (["m.fit_generator(d, steps_per_epoch=2)"], "Keras 3 has no `fit_generator`"),
        (["m.compile(loss=Loss(reduction=losses.Reduction.SUM))"], "no `losses.Reduction.SUM`"),
        (["accuracy.reset_states()"], "Keras 3 has no `reset_states`"),
    ],
)
def test_what_is_not_understood_is_marked_above_its_line(lines, why):
    text, marks = migrated(hvd(*lines))
    assert any(why in mark for mark in marks), marks
    above = next(line for line in text.splitlines() if why in line)
    assert above.lstrip().startswith("# dtk migrate: ") and "; see docs/migrating.md#" in above


TENSORFLOW = """
    import tensorflow as tf

    cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster_resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            cluster_resolver.cluster_spec(), job_name=cluster_resolver.task_type)
        server.join()
    strategy = tf.distribute.experimental.ParameterServerStrategy(cluster_resolver)
    with strategy.scope():
        model = build_and_compile()
"""


def test_tf_distribute():
    text, marks = migrated(TENSORFLOW)
    assert not marks and "Server" not in text.replace("ParameterServerStrategy", "")
    assert "strategy = dtk.migrate.tf_distribute.ParameterServerStrategy(cluster_resolver)" in text
    for name, made in (
        ("MirroredStrategy", "dtk.auto_strategy"),
        ("MultiWorkerMirroredStrategy", "dtk.strategies.AllReduceStrategy"),
    ):
        text, marks = migrated(f"import tensorflow as tf\ns = tf.distribute.{name}()\n")
        assert not marks and text == f"import dtk\nimport tensorflow as tf\ns = {made}()\n"


@pytest.mark.parametrize(
    "line, why",
    [
        ("s = tf.distribute.TPUStrategy()", "dtk has no TPUs"),
        ("s = tf.distribute.get_strategy()", "this trains on one process"),
        ("tf.distribute.Server(spec)", "ParameterServerStrategy() serves"),
        ("n = len(json.loads(os.environ['TF_CONFIG'])['cluster'])", "use strategy.size and rank"),
        ("model.compile('sgd')\ns = tf.distribute.MirroredStrategy()", "`s` is made later"),
    ],
)
def test_names_of_tf_distribute_that_are_marked(line, why):
    _, marks = migrated(f"import tensorflow as tf\n{line}\nm.compile()\n")
    assert any(why in mark for mark in marks), marks


def test_a_function_that_is_called_in_a_scope_compiles_there():
    text, _ = migrated(
        """
        import tensorflow as tf
        strategy = tf.distribute.MirroredStrategy()
        def build():
          model.compile("sgd")
        with strategy.scope():
          build()
        other.compile("sgd", text='''
        stays''')
        """
    )
    assert text.count("with ") == 2
    assert text.endswith("with strategy.scope():\n  other.compile(\"sgd\", text='''\nstays''')\n")


@pytest.mark.parametrize(
    "text, told",
    [
        ("import chainermn\n", "a script of ChainerMN"),
        ("import torch\nimport horovod.torch as hvd\nhvd.init()\n", "a script of PyTorch"),
        ("print(1)\n", "compiles no model"),
        ("import re\nre.compile('a')\n", "compiles no model"),
    ],
)
def test_what_is_no_script_of_keras(text, told):
    found = migrate(text.encode())
    assert told in found.refusal and found.text == text.encode() and not found.is_done


def command(*arguments):
    return click.testing.CliRunner().invoke(main, ["migrate", *map(str, arguments)])


def test_the_command_writes_whole_files_and_keeps_their_mode(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text_of(HOROVOD))
    script.chmod(0o750)
    shown = command(script)
    assert shown.exit_code == 0 and shown.stdout.startswith(f"--- {script}\n+++ {script}\n@@ ")
    assert "\n-import horovod.keras as hvd\n" in shown.stdout
    assert f"`dtk check {script}` and `dtk run -n 2 {script}`" in shown.stderr
    assert script.read_text() == text_of(HOROVOD)
    assert command("--write", script).exit_code == 0
    assert script.read_text() == text_of(MOVED)
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]
    again = command("--write", script)
    assert again.exit_code == 0 and not again.stdout and "dtk already" in again.stderr


def test_the_command_lists_marks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(hvd("hvd.join()\n"))
    done = command("--write", script)
    assert done.exit_code == 1 and f"{script}:8: left to you: Horovod's `join`" in done.stderr
    assert command(script).exit_code == 1  # the marks are still there


def test_a_script_that_cannot_be_parsed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import keras\nx = (1\n")
    done = command("--write", script)
    assert done.exit_code == 2 and f"{script}:2:5: '(' was never closed" in done.stderr
    assert script.read_text() == "import keras\nx = (1\n"


@pytest.mark.parametrize("line", [1, 9])
def test_a_script_that_cannot_be_decoded(tmp_path, line):
    script = tmp_path / "train.py"
    text = b"import keras\n" * line + b"# caf\xe9\nm.compile('sgd')\n"
    script.write_bytes(text)
    done = command("--write", script)
    assert done.exit_code == 2 and "can't decode byte 0xe9" in done.stderr
    assert "nothing was changed" in done.stderr and script.read_bytes() == text


def test_what_is_made_is_python_or_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("dtk.migrate.script.Source.result", lambda self: b"import dtk\nx = (1\n")
    script = tmp_path / "train.py"
    script.write_text(text_of(KERAS))
    done = command("--write", script)
    assert done.exit_code == 2 and "line 2 is not Python ('(' was never closed)" in done.stderr
    assert "a fault of dtk's, not of the script" in done.stderr
    assert script.read_text() == text_of(KERAS)


def test_two_ranks_train_as_one_process_with_their_batch(tmp_path):
    """The weights of Horovod's script, moved, are those of one process with both ranks' rows."""
    script = tmp_path / "train.py"
    script.write_bytes(migrate(text_of(HOROVOD).encode()).text)
    done = dtk_run("-n", 2, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    x = np.random.default_rng(0).normal(size=(48, 3))
    y, weights, bias = x.sum(axis=1), np.zeros(3), 0.0
    for _ in range(6):
        for rows in np.split(np.arange(48), 6):  # eight rows: four of each of two ranks
            error = x[rows] @ weights + bias - y[rows]
            weights -= 0.1 * 2 * x[rows].T @ error / 8  # twice the rate of one rank
            bias -= 0.1 * 2 * error.mean()
    trained = ast.literal_eval(done.stdout.strip().splitlines()[-1].removeprefix("[0] "))
    np.testing.assert_allclose(trained, weights, rtol=1e-4)
    assert (tmp_path / "best.keras").exists()
