"""Which files of Keras's tests are run: those whose tests train through `fit` and its like.

Left out are tests of data adapters, layers, losses and metrics, which involve no strategy or call
it outside any step, and tests of other backends. The paths are those of Keras 3.15.
"""

from __future__ import annotations

ALL = (
    "keras/src/trainers/trainer_test.py",
    "keras/src/trainers/compile_utils_test.py",
    "keras/src/trainers/epoch_iterator_test.py",
    *(
        f"keras/src/callbacks/{name}_test.py"
        for name in (
            "backup_and_restore",
            "callback",
            "csv_logger",
            "early_stopping",
            "lambda_callback",
            "learning_rate_scheduler",
            "model_checkpoint",
            "monitor_callback",
            "orbax_checkpoint",
            "reduce_lr_on_plateau",
            "remote_monitor",
            "swap_ema_weights",
            "tensorboard",
            "terminate_on_nan",
        )
    ),
    "keras/src/models/model_test.py",
    "keras/src/models/functional_test.py",
    "keras/src/distillation/distiller_test.py",
    "keras/src/distillation/distillation_loss_test.py",
    *(
        f"keras/src/optimizers/{name}_test.py"
        for name in ("optimizer", "adam", "lion", "muon", "multi_optimizer", "schedule_free_adamw")
    ),
    "integration_tests/tf_custom_fit_test.py",
)
