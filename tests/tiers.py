"""Which tests `make test-fast`, `make test` and `make test-all` run.

A test earns its seconds by what no other test would notice (`make mutants` breaks dtk at random and
counts what is noticed). `make test` runs every rule once, where it is cheapest: a case of `fit` on
two devices of one process, and between processes only what their number or the wire changes. The
same rule in another world, at another size or by another route is of the tier `full`.
"""

from __future__ import annotations

import re

# Of `make test-all` only: tests whose name, from tests/ on, begins so; and why.
FULL = (
    # every optimizer meets every clipping and tail at two workers; three are the same code
    r"strategies/test_equivalence.py::test_n_workers_equal_one_process\[(collective|mirrored)-1",
    r"strategies/test_equivalence.py::test_n_workers_equal_one_process\[horovod-gloo-[13]",
    r"strategies/test_equivalence.py::test_n_workers_equal_one_process\[horovod-mpi-[13]",
    r"strategies/test_equivalence.py::test_n_workers_equal\S+\[horovod-mpi-2-(adam|ema|sgd)",
    r"strategies/test_equivalence.py::test_n_workers_equal\S+\[horovod-gloo-2",
    r"strategies/test_equivalence.py::test_n_workers_equal\S+\[collective-2-(adamw|sgd|ema|loss)",
    r"strategies/test_equivalence.py::test_n_workers_equal_one_process\[collective-3-(adam-|loss)",
    r"strategies/test_equivalence.py::test_n_workers_equal_one_process\[mirrored-2-(sgd|ema|loss)",
    r"strategies/test_equivalence.py::test_n_workers_equal_one_process\[mirrored-3",
    r"strategies/test_equivalence.py::test_a_model_built_outside_the_scope\[(horovod|collective)",
    # what runs between processes need not run between devices as well
    r"strategies/test_cases.py::test_the_same_as_one_process\[mirrored-2-(eager steps|evaluate and"
    r"|fewer rows|outputs with a tail of one|own train step that logs numbers|ragged inputs"
    r"|single batches|steps per execution)",
    # the same way as a shorter one
    r"strategies/test_cases.py::test_the_same_as_one_process\[mirrored-2-(two models in one scope"
    r"|compiled twice|generators\]|py datasets|endless|averages that|schedules|class weights and"
    r" validation steps|metrics made)",
    r"strategies/test_cases.py::test_the_same_with_three_workers",
    r"strategies/test_cases.py::test_some_elsewhere\[horovod",
    # one communicator of each kind, and three ranks where a ring differs from a pair
    r"communicators/test_contract.py::(?!test_horovod_makes)\S+\[horovod-gloo",
    r"communicators/test_contract.py::\S+\[horovod-mpi-[13]",
    r"communicators/test_contract.py::test_collectives\[horovod-mpi-2-graph",
    r"communicators/test_contract.py::test_collectives_between_the_devices",
    r"communicators/test_contract.py::test_(behaviour|send_and_recv|barrier_waits)\S*\[collective-2",
    r"communicators/test_contract.py::test_null_keeps_shapes\S*graph",
    r"communicators/test_contract.py::test_collectives\[collective-2",
    r"communicators/test_contract.py::test_collectives\[collective-3-eager",
    r"strategies/test_promises.py::\S*(horovod|collective-3)",
    r"strategies/test_moments.py::test_own_steps_between_mirrored",
    r"strategies/test_moments.py::\S*(collective-3|whatever_is_normalized\[collective-2--1)",
    r"strategies/test_mistakes.py::test_(an_exception_in_the_middle|fewer_devices)",
    r"strategies/test_feeding.py::test_no_pipeline_waits",
    # half a minute of waiting, for a rule that is tested by its times as well
    r"launch/test_stall.py::test_a_loop_without_an_end",
    # ranks of plain Python are missing in the same ways; these are those of real training
    r"launch/test_stall_phases.py",
    r"launch/test_served_stall.py",
    r"strategies/test_watching.py::\S*(\[mpi-s|\[horovod|\[collective-s|others\[mpi|alone\]|busy\])",
    r"strategies/test_watching.py::test_a_rank_that_leaves_early",
    r"strategies/test_watching.py::test_rank_0_is_watched",
    r"strategies/test_evaluator.py::test_a_killed_evaluator",
    # the same scripts, of which the others are shorter; Horovod is run as a command besides
    r"published/test_published.py::test_two_processes_end_as_one\[horovod-mpi-2-(vae|horovod)",
    r"published/test_published.py::test_two_processes_end_as_one\[collective-2-("
    r"activity_regularizer|chainermn_mnist|cntk_convnet|custom_metric|custom_step_compute_loss"
    r"|custom_step_sample_weight|custom_test_step|custom_training_checkpoint"
    r"|endpoint_layer_subclassed|horovod_tf2_keras_mnist|knowledge_distillation"
    r"|parameter_server_|py_dataset|save_and_load|siamese_network|subclassing_vae"
    r"|text_transformer|vq_vae|custom_training|custom_step_gan|endpoint_layer|horovod"
    r"|multi_worker|fit_with)",
    r"published/test_published.py::test_two_processes_end_as_one\[collective-2-(wgan|siamese|vae)",
    r"published/test_published.py::test_what_is_not_made_of_rows_\S+\[collective-2-(image|simclr)",
    r"published/test_published.py::test_parameter_servers_end_as_one\[served-2-(activity|custom"
    r"|endpoint|fit_with|save_and|siamese|subclassing|vae|parameter_server_embedding)",
    r"published/test_published.py::test_as_a_command",
    # a step behind servers is the same step: what concerns rows, and what servers hold
    r"strategies/test_parameter_server.py::test_features_of_fit\[(class weights|compiled twice"
    r"|curves|datasets|endless|generators|lists|metrics|own train step-|py datasets|saved|schedules"
    r"|several|strings|subclassed|two models|model and|accumulation|averages|masked|own train"
    r"|ragged|sample weights|steps per|summed|variables)",
    r"strategies/test_parameter_server.py::test_synchronous_steps_equal_one_process\[served-[13]",
    r"strategies/test_parameter_server.py::test_synchronous_\S+\[served-2-(adamw|loss|sgd)",
    r"strategies/test_parameter_server.py::test_accuracy_on_the_digits",
    r"strategies/test_parameter_server.py::test_synchronous_\S+\[served-2-ema",
    r"strategies/test_parameter_server.py::test_backups_and_serial_\S+\[Bounded",
    r"strategies/test_parameter_server.py::test_tables\[(sync-1|Bounded\S+ \S+-2)",
    r"strategies/test_served_features.py::test_(every_gradient|pushing)\S+\[.*(Bounded|fetch_every=2)",
    r"strategies/test_served_features.py::test_no_slot_loses_an_update\[served-2-(mom|aver)",
    r"strategies/test_served_features.py::test_callbacks\[served-2-(broad|rate)",
    r"strategies/test_served_steps.py::test_workers_that_reduce\S+-True",
    r"strategies/test_lost_tasks.py::test_a_killed_worker_\S+\[served-2-(plain|downpour)",
    r"strategies/test_lost_tasks.py::test_a_killed_server_ends_the_job_clearly",
    r"strategies/test_proximal.py::test_a_killed_worker_changes_nothing",
    r"strategies/test_served_features.py::test_callbacks_may_predict_and_evaluate\S+\[[^]]*async",
    r"strategies/test_served_optimizers.py::test_every_optimizer_trains_tables",
    # these worlds take four and six processes: when steps may start is tested by itself
    r"strategies/\S+\[.*served-[13]",
    r"strategies/test_served_steps.py::test_the_job_of_a_refused_step_ends",
    r"strategies/test_served_steps.py::test_workers_that_reduce_take",
    r"strategies/test_proximal.py::test_late_gradients",
    r"callbacks/test_\w+.py::test_behind_parameter_servers",
    # one way of being interrupted of each kind
    r"callbacks/test_checkpoint.py::test_resumed_equals_uninterrupted\[collective-2-(averaging"
    r"|swapped|execution|epoch|dataset|stream|scaled|schedule|quantised)",
    r"callbacks/test_checkpoint.py::test_resumed_equals_uninterrupted_in_one_process\[scaled",
    r"callbacks/test_checkpoint_on_sigterm.py::test_sigterm_during_validation_saves",
    r"callbacks/test_checkpoint.py::test_(python_and_numpy|a_dropout_or_metric)",
    r"callbacks/test_sample_rate.py::test_a_resumed_run_ends",
    r"callbacks/test_evaluation.py::test_(a_resumed_run_counts_on|two_ranks|what_cannot)",
    r"callbacks/test_batch_size.py::test_(a_trial_leaves_no_bit_changed|the_batch_doubles\S*)"
    r"\[collective",
    r"callbacks/test_checkpoint_files.py::test_a_process_killed\S+\[(flushing|writing [wa])",
    r"callbacks/test_find_non_finite.py::test_(behind_servers|other_steps|it_ends\S+\[collective)",
    r"callbacks/test_find_non_finite.py::\S+\[collective-2-(1|2-1)\]",
    r"callbacks/test_small_callbacks.py::test_progress_on_rank_0\S+\[collective-2-(n|geom)",
    r"callbacks/test_sample_rate.py::test_a_growing_batch\[collective-2-plain",
    r"data/test_shard.py::test_training_on_shards\S+\[False",
    # lossy exchanges: their equations are tested by themselves
    r"exchange/test_exchange.py::test_accuracy_on_the_digits",
    r"exchange/test_auto.py::test_(windows_of|once_enough\S*two)",
    r"exchange/test_blocks.py::test_(numbers_that_no|blocks_within|moving_statistics)",
    r"exchange/test_blocks.py::test_training_that_is_taken_back\S*\[collective-2-Block",
    r"exchange/test_exchange.py::test_kernels_of_dense_layers_on_sequences_are_coded\[horovod",
    r"exchange/test_exchange.py::test_training_is_close_to_one_process\[collective-2-(8bit|bf16"
    r"|16bit|WarmStart\(exchange=(Block|Delay)|Dense)",
    r"exchange/test_exchange.py::test_features_of_fit_with\S+\[collective-2-(two|eager|spar)",
    r"exchange/test_exchange.py::test_ranks_hold_the_same_bits_after_500_steps",
    r"exchange/test_exchange.py::test_bytes_of_a_step_are_counted",
    r"exchange/test_quantized.py::test_gradients_are_quantised_twice\S+\[collective-(2|3-4|3-11)",
    r"exchange/test_blocks.py::test_block_momentum_trains\S+\[collective-3",
    r"exchange/test_factors.py::test_few_rows_send_factors\S+\[horovod",
    r"optimizers/test_workers.py::test_two_workers_equal_one_process\[collective",
    # whole commands: one of each
    r"cli/test_bench_hosts.py",
    r"cli/test_bench.py::test_(every_turn|the_tables|the_command|bytes_are|a_block|what_is_saved"
    r"|the_setting|a_peer_that_cannot|the_rest_goes_on)",
    r"cli/test_check.py::test_a_(script_that_trains_nothing|step_that_adds_up)",
    r"launch/test_stall.py::test_(a_rank_that_(sleeps\S+\[(auto|horo)|is_stopped)|data_that|a_slow)",
    r"cli/test_tune.py::test_(a_real_script|a_script_that|settings_that_fit|ranks_with|what_auto)",
    r"cli/test_doctor.py::test_the_real_libraries",
    r"cli/test_install_horovod.py::test_installed_horovod_really_reduces",
    r"launch/test_ssh.py::test_parameter_servers_on_two_hosts",
    r"launch/test_ssh.py::test_a_rank_(ends_when_its_launcher|behind_a_cut)",
    r"launch/test_stall.py::test_a_rank_that_is_cut_off",
    r"launch/test_reports.py::test_ranks_that_wait",
    r"test_world.py::test_a_failure_ends_every_process\[collective-2-(sleep|die)",
    r"callbacks/test_batch_norm_statistics.py::test_(synchronized|two_ranks\[collective-2-dataset)",
    r"callbacks/test_evaluation.py::test_two_ranks\[collective-2-dataset",
    r"test_benchmarks.py::test_(costs_prints|network_keeps|plan_compares|startup_prints|messages"
    r"|cntks_table)",
    r"test_examples.py::test_(the_showcase|parameter_servers|two_devices|a_large_table|cifar10"
    r"|block_updates|horovod_under|a_custom_loop|a_model_in_parts|a_search|stages_on"
    r"|a_unet|vgg16|the_demo\[1|a_dcgan)",
    # three ranks train six times
    r"strategies/test_determinism.py",
    # the same pipelines, ten times as many
    r"input/test_row_maps.py::test_(what_a_rank_gets_is_the_same\[60|a_rank_needs_only)",
    # what networks are made of is counted without training them
    r"test_networks.py::test_(a_step_of_two|networks_have\S*\[resnet110)",
    r"test_horovod_wrapper.py",
    # worlds of four and three, and the way back of a checkpoint
    r"(layers/test_pipeline|strategies/test_grid).py::\S+\[(collective-[34]|horovod)",
    r"layers/test_pipeline.py::test_what_one_rank_has_saved",
    # each of these says once more, at more cost, what a test that stays says
    r"communicators/test_create.py::test_a_tensor_before_the_strategy",
    r"communicators/test_contract.py::test_(places\[collective-1|horovod_makes_groups)",
    r"communicators/test_measuring_once.py::test_other_processors",
    r"published/test_published.py::test_parameter_servers_end_as_one\[served-2-parameter_server_fit",
    r"published/test_published.py::test_two_processes_end\S+\[(horovod|\S+-2-dcgan)",
    r"published/test_published.py::test_what_is_not_made_of_rows_\S+\[collective-2-(masked|add)",
    r"strategies/test_cases.py::test_the_same_as_one\S+\[collective-2-(own train|outputs with)",
    r"strategies/test_cases.py::test_the_same_as_one\S+\[mirrored-2-(two models|curves|lists of"
    r"|generators that|two optimizers|subclassed|datasets of dicts)",
    r"strategies/test_equivalence.py::test_n_workers_equal_one_process\[mirrored-2-adamw-global",
    r"strategies/test_mistakes.py::test_a_script_that_fails_is_told_nothing_else",
    r"strategies/test_feeding.py::test_workers_of_a_py_dataset_are_not_read_ahead\[None",
    r"strategies/test_parameter_server.py::test_features_of_fit\[(outputs with|sparse|mean over)",
    r"strategies/test_parameter_server.py::test_a_slow_worker_is_waited_for\S+\[1",
    r"strategies/test_promises.py::test_custom_loops\[collective-2-epoch",
    r"strategies/test_promises.py::test_one_rank_that_stops_in_an_epoch\S+\[a function",
    r"strategies/test_proximal.py::test_a_matrix_of_float32",
    r"strategies/test_saving.py::test_a_second_strategy",
    r"strategies/test_self_test.py::test_losses_of_ones_own\[(mixed|scalar)",
    r"strategies/test_served_features.py::test_(a_fit_that_was_left|every_gradient\S+\[served-2-sync)",
    r"strategies/test_served_steps.py::test_steps_that_need_no_update\S+\[served-2-(pers|rate|with)",
    r"strategies/test_served_optimizers.py::test_constraints_hold_\S+\[served-2-unit",
    r"callbacks/test_batch_size.py::test_two_ranks\[collective-2-dataset",
    r"callbacks/test_checkpoint.py::test_the_best_of_an_earlier_run",
    r"callbacks/test_evaluation.py::test_a_final_test\S+-True",
    r"callbacks/test_keras_callbacks.py::test_backup_and_restore",
    r"callbacks/test_small_callbacks.py::test_everyone_starts_from_root\[collective-2-0",
    r"exchange/test_auto.py::test_a_resumed_run_goes_on",
    r"exchange/test_blocks.py::test_block_momentum_trains\S+\[collective-2-False",
    r"exchange/test_blocks.py::test_training_that_is_taken_back",
    r"exchange/test_exchange.py::test_features_of_fit_with\S+\[collective-2-fewer",
    r"exchange/test_exchange.py::test_training_is_close_to_one_process\[collective-2-WarmStart",
    r"exchange/test_factors.py::test_few_rows_send_factors\S+\[collective-2-uneven",
    # gradients through collectives are the same over every transport; layers are built of them
    r"layers/test_collectives.py::\S+\[(horovod|collective-3)",
    r"layers/test_collectives.py::test_(gradients_are|regions_count)\S+\[local",
    r"layers/test_collectives.py::test_gradients_are_those\S+\[collective-2-graph",
    r"layers/test_channel_parallel.py::test_divided_layers_equal_one_device\[(local|collective-2)",
    r"layers/test_spatial.py::test_parts_of_an_image_equal_the_whole\[collective-2",
    # two trials are trained besides; a rank that gives up ends a job as one that is killed
    r"search/test_study.py::test_twelve_trials_\S+\[collective-2-fit",
    r"search/test_killed.py::\S*\[raise",
    r"search/test_\w+.py::\S*\[horovod",
    # two groups on a journal take the same way
    r"search/test_groups.py::test_groups_share_a_database",
    # noise of fakes and then reals, and kinks: strategies/test_self_test.py has them in small
    r"published/test_published.py::test_random_numbers_are\S+custom_step_gan",
    # cheaper tests say nearly the same, and none of 249 broken rules needed these
    r"layers/test_pipeline.py::test_two_stages\S+\[collective-2-gpipe",
    r"layers/test_channel_parallel.py::test_in_fit",
    r"inference/test_quantize.py::test_two_ranks",
    r"strategies/test_equivalence.py::test_n_workers\S+\[mirrored-2-adam-acc",
    r"strategies/test_evaluator.py::test_checkpoints_are",
    r"published/test_published.py::test_parameter_servers_are_right\S+add_loss_sum",
    r"published/test_published.py::test_two_processes_end\S+custom_step_own_loss",
    r"published/test_published.py::test_a_number_that_is_not",
    r"published/test_published.py::test_a_coordinator_schedules",  # how far it learns is chance
    r"search/test_killed.py::\S+\[kill",
    r"search/test_groups.py::test_a_group_trains",
    r"launch/test_ssh.py::test_horovod_reduces",
    r"inference/test_predict_to_disk.py::test_a_killed_job",
    r"cluster/test_slurm_jobs",
    r"callbacks/test_checkpoint_background.py::test_a_job_with_servers",
    r"communicators/test_create.py::test_(two_ranks_come_up|a_peer_that_dies)",
    r"communicators/test_measuring_once.py::test_(measured|a_strategy)\S+\[horovod",
    r"communicators/test_contract.py::test_behaviour\[collective-3-keys",
    r"callbacks/test_batch_size.py::test_a_trial_leaves",
    r"callbacks/test_batch_norm_statistics.py::test_two_devices",
    r"callbacks/test_checkpoint.py::test_resumed_equals_uninterrupted_in_one_process\[steps-mirr",
    r"callbacks/test_evaluation.py::test_(the_rate_is_halved\S+\[collective|two_devices)",
    r"exchange/test_auto.py::test_once_enough",
    r"exchange/test_blocks.py::test_(a_block_is_closed|evaluating_closes)",
    r"exchange/test_exchange.py::test_kernels_of_dense_layers_on",
    r"exchange/test_factors.py::test_many_rows",
    r"layers/test_channel_parallel.py::test_divided_layers_equal_one_device\[collective-3",
    r"layers/test_whole.py::test_what_one_layout\S+-rows",
    r"strategies/test_cases.py::test_the_same_as_one\S+\[mirrored-2-(layers in float8|variables"
    r"|saved and|several out|sample weights|sparse)",
    r"strategies/test_equivalence.py::test_a_model_built_outside",
    r"strategies/test_feeding.py::test_three_epochs_cut_one_pipeline\[collective",
    r"strategies/test_grid.py::test_parts_are_clipped\S+clipvalue",
    r"strategies/test_lost_tasks.py::test_a_server_without",
    r"strategies/test_promises.py::test_(only_rank_0_draws|single_batches_train)",
    r"strategies/test_saving.py::test_every_rank_may_save",
    r"strategies/test_served_features.py::test_(callbacks_may_predict|callbacks\[served-2-check)",
    r"strategies/test_served_steps.py::test_adversaries_whose\S+-sync",
    # the same by another way of reading, or in another format; the examples are whole commands
    r"inference/test_predict_to_disk.py::test_whatever_the_data_is_\S+\[(memory map|function)",
    r"inference/test_predict_to_disk.py::test_(half_precision|ranks_that_differ|devices_and|whatever\S+\[dataset)",
    r"inference/test_export.py::test_(several_inputs\S+\[(tf_saved|litert)|what_cannot|an_artifact|a_model_that)",
    r"inference/test_quantize.py::test_(litert_takes|a_student_of)",
    r"test_examples.py::test_(exports_of|distilled|predictions_on|mobilenet)",
)
# Whole commands, which `make test-fast` leaves out as it does worlds of several processes.
COMMANDS = re.compile(
    r"cli/test_(bench|check|run|doctor|install)|launch/|published/|documents/test_blocks"
    r"|test_examples|test_benchmarks|strategies/test_(lost_tasks|evaluator|proximal|resolver|devices)"
    r"|strategies/test_mistakes.py::test_(?!every)|strategies/test_served_steps.py::\S*refused_step_ends"
    r"|communicators/test_create"
    r"|callbacks/test_(termination|checkpoint_files)|test_garbage|test_quiet|test_makefile|test_import_time|test_horovod_wrapper|test_versions|search/test_killed|inference/\S+killed_job|cluster/test_(detect|slurm|mpi_installs|heartbeats)"
)
_FULL = re.compile("|".join(FULL))


def is_full(name: str) -> bool:
    """Whether a test, named from tests/ on, is for `make test-all` only."""
    return _FULL.match(name) is not None


def is_fast(name: str, world: tuple[str, int]) -> bool:
    """Whether a test runs in one process, and is no command."""
    return world in (("", 0), ("local", 1)) and not COMMANDS.match(name)
