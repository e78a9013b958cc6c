"""Which tests `make test-fast`, `make test` and `make test-all` run.

A test earns its seconds by what no other test would notice (`make mutants` breaks dtk at random and
counts what is noticed). `make test` runs every rule once, where it is cheapest: a case of `fit` on
two devices of one process, and between processes only what their number or the wire changes. The
same rule in another world, at another size or by another route is of the tier `full`.
"""

from __future__ import annotations

import os
import re

# Of `make test-all` only: tests whose name, from tests/ on, begins so; and why.
FULL = (
    # one communicator of each kind, and three ranks where a ring differs from a pair
    r"communicators/test_contract.py::(?!test_horovod_makes)\S+\[horovod-gloo",
    r"communicators/test_contract.py::\S+\[horovod-mpi-[13]",
    r"communicators/test_contract.py::test_collectives\[horovod-mpi-2-graph",
    r"communicators/test_contract.py::test_collectives_between_the_devices",
    # how a communicator behaves is nearly all of `base.py`, and so the same over every wire
    r"communicators/test_contract.py::test_behaviour\[(collective-3|nccl|mpi-wheel)",
    r"communicators/test_contract.py::test_send_and_recv\[(collective-2|nccl-2-graph)",
    r"communicators/test_contract.py::test_null_keeps_shapes\S*graph",
    r"communicators/test_contract.py::test_collectives\[collective-2",
    # graphs of collectives over one wire; the others carry the same messages
    r"communicators/test_contract.py::test_collectives\[(collective-3-eager|(nccl|mpi-wheel)-2-graph)",
    r"strategies/test_promises.py::\S*(horovod|collective-3)",
    r"strategies/test_gpus.py::test_groups_that_share",  # four processes
    # half a minute of waiting, for a rule that is tested by its times as well
    r"launch/test_stall.py::test_a_loop_without_an_end",
    # ranks of plain Python are missing in the same ways; these are those of real training
    r"launch/test_stall_phases.py::(?!.*\[dtk run, collectives-fit-sleep-callback)",
    r"launch/test_served_stall.py",
    r"strategies/test_evaluator.py::test_a_killed_evaluator",
    # what scripts do is tried in small, strategies/test_self_test.py and cases.py have most of it
    r"published/test_published.py::(?!test_parameter_servers_are_right\S+masked)",
    r"strategies/test_parameter_server.py::test_synchronous_\S+\[served-2-(adamw|loss|sgd)",
    r"strategies/test_parameter_server.py::test_synchronous_\S+\[served-2-ema",
    r"strategies/test_parameter_server.py::test_tables\[(sync-1|Bounded\S+ \S+-2)",
    r"strategies/test_served_features.py::test_(every_gradient|pushing)\S+\[.*(Bounded|fetch_every=2)",
    r"strategies/test_lost_tasks.py::test_a_killed_worker_\S+\[served-2-(plain|downpour)",
    r"strategies/test_lost_tasks.py::test_a_killed_server_ends_the_job_clearly",
    r"strategies/test_served_optimizers.py::test_every_optimizer_trains_tables",
    # these worlds take four and six processes: when steps may start is tested by itself
    r"strategies/\S+\[.*served-[13]",
    r"strategies/test_proximal.py::test_late_gradients",
    r"callbacks/test_\w+.py::test_behind_parameter_servers",
    r"engines/test_ray.py::(?!test_without_ray)",  # Ray is 250 MB, and a test of it takes a minute
    # minutes of real pods that are killed and started again
    r"engines/test_kubernetes.py::test_(?!exit_codes)",
    r"engines/test_spark.py::(?!test_without_pyspark)",  # with Java, 600 MB
    r"callbacks/test_trackers.py",  # MLflow and Weights & Biases are 190 MB
    # one way of being interrupted of each kind
    r"callbacks/test_checkpoint.py::test_resumed_equals_uninterrupted\[collective-2-(averaging"
    r"|swapped|execution|epoch|dataset|stream|scaled|schedule|quantised)",
    r"callbacks/test_checkpoint.py::test_resumed_equals_uninterrupted_in_one_process\[scaled",
    r"callbacks/test_checkpoint_on_sigterm.py::test_sigterm_during_validation_saves",
    r"callbacks/test_sample_rate.py::test_a_resumed_run_ends",
    r"callbacks/test_evaluation.py::test_(a_resumed_run_counts_on|two_ranks)",
    r"callbacks/test_batch_size.py::test_(a_trial_leaves_no_bit_changed|the_batch_doubles\S*)"
    r"\[collective",
    r"callbacks/test_find_non_finite.py::test_(behind_servers|other_steps|it_ends\S+\[collective)",
    r"callbacks/test_find_non_finite.py::\S+\[collective-2-(1|2-1)\]",
    r"callbacks/test_keras_callbacks.py::test_progress_on_rank_0\S+\[collective-2-(n|geom)",
    r"callbacks/test_sample_rate.py::test_a_growing_batch\[collective-2-plain",
    r"data/test_shard.py::test_training_on_shards\S+\[False",
    # lossy exchanges: their equations are tested by themselves
    r"exchange/test_auto.py::test_(windows_of|once_enough\S*two)",
    r"exchange/test_blocks.py::test_(numbers_that_no|blocks_within|moving_statistics)",
    r"exchange/test_blocks.py::test_training_that_is_taken_back\S*\[collective-2-Block",
    r"exchange/test_exchange.py::test_kernels_of_dense_layers_on_sequences_are_coded\[horovod",
    r"exchange/test_exchange.py::test_training_is_close_to_one_process\[collective-2-(8bit|bf16"
    r"|16bit|WarmStart\(exchange=(Block|Delay)|Dense)",
    r"exchange/test_exchange.py::test_features_of_fit_with",
    r"exchange/test_exchange.py::test_ranks_hold_the_same_bits_after_500_steps",
    r"exchange/test_exchange.py::test_bytes_of_a_step_are_counted",
    r"exchange/test_quantized.py::test_gradients_are_quantised_twice\S+\[collective-(2|3-4|3-11)",
    r"exchange/test_blocks.py::test_block_momentum_trains\S+\[collective-3",
    r"exchange/test_factors.py::test_few_rows_send_factors\S+\[horovod",
    # dearer worlds and slower ways of what is said besides
    r"communicators/test_contract.py::test_collectives\[horovod-mpi-2-eager",
    r"communicators/test_contract.py::test_send_and_recv\[(collective-3|horovod-mpi-2)-graph",
    r"cli/test_doctor.py::test_a_name_of_the_real_keras_that_has_gone",
    r"exchange/test_quantized.py::\S+\[collective-3",
    r"layers/test_spatial.py::\S+\[collective-3",
    # whole commands: one of each
    r"cli/test_bench_hosts.py",
    r"cli/test_bench.py::test_(every_turn|the_tables|the_command|bytes_are|a_peer_that_cannot)",
    r"cli/test_check.py::test_a_(script_that_trains_nothing|step_that_adds_up)",
    r"cli/test_tune.py::test_(a_real_script|a_script_that|settings_that_fit|ranks_with|what_auto)",
    r"cli/test_doctor.py::test_the_real_libraries",
    r"cli/test_install_horovod.py::test_installed_horovod_really_reduces",
    r"launch/test_ssh.py::test_parameter_servers_on_two_hosts",
    r"launch/test_ssh.py::test_a_rank_(ends_when_its_launcher|behind_a_cut)",
    r"launch/test_stall.py::test_a_rank_that_is_cut_off",
    r"launch/test_reports.py::test_ranks_that_wait",
    r"callbacks/test_batch_norm_statistics.py::test_(synchronized|two_ranks\[collective-2-dataset)",
    r"callbacks/test_evaluation.py::test_two_ranks\[collective-2-dataset",
    r"test_benchmarks.py::test_(costs_prints|cntks_table)",
    # half a minute each: building and installing, building the site, a notebook with its ranks
    r"test_wheel.py",
    r"test_site.py",
    r"launch/test_notebook.py::test_the_example",
    r"documents/test_blocks.py::\S+tutorials/notebook",
    # three ranks train six times
    r"strategies/test_determinism.py",
    # the same pipelines, ten times as many
    r"pipelines/test_row_maps.py::test_(what_a_rank_gets_is_the_same\[60|a_rank_needs_only)",
    # what networks are made of is counted without training them
    r"test_networks.py::test_(a_step_of_two|networks_have\S*\[resnet110)",
    # worlds of four and three, and the way back of a checkpoint
    r"(layers/test_pipeline|strategies/test_grid).py::\S+\[(collective-[34]|horovod)",
    # each of these says once more, at more cost, what a test that stays says
    r"communicators/test_create.py::test_a_tensor_before_the_strategy",
    r"communicators/test_contract.py::test_(places\[collective-1|horovod_makes_groups)",
    r"communicators/test_measuring_once.py::test_other_processors",
    r"strategies/test_proximal.py::test_a_matrix_of_float32",
    r"strategies/test_served_steps.py::test_steps_that_need_no_update\S+\[served-2-(pers|rate|with)",
    r"strategies/test_served_optimizers.py::test_constraints_hold_\S+\[served-2-unit",
    r"callbacks/test_batch_size.py::test_two_ranks\[collective-2-dataset",
    r"callbacks/test_checkpoint.py::test_the_best_of_an_earlier_run",
    r"callbacks/test_evaluation.py::test_a_final_test\S+-True",
    r"callbacks/test_keras_callbacks.py::test_backup_and_restore",
    r"callbacks/test_keras_callbacks.py::test_everyone_starts_from_root\[collective-2-0",
    r"exchange/test_auto.py::test_a_resumed_run_goes_on",
    r"exchange/test_blocks.py::test_block_momentum_trains\S+\[collective-2-False",
    r"exchange/test_blocks.py::test_training_that_is_taken_back",
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
    r"search/test_\w+.py::\S*\[horovod",
    # two groups on a journal take the same way
    r"search/test_groups.py::test_groups_share_a_database",
    # cheaper tests say nearly the same, and none of 249 broken rules needed these
    r"layers/test_pipeline.py::test_stages_train\S+\[collective-2-gpipe",
    r"layers/test_channel_parallel.py::test_in_fit",
    r"inference/test_quantize.py::test_two_ranks",
    r"strategies/test_evaluator.py::test_checkpoints_are",
    r"search/test_study.py::test_the_job_ends",
    r"search/test_groups.py::test_a_group_trains",
    r"launch/test_ssh.py::test_horovod_reduces",
    r"inference/test_predict_to_disk.py::test_a_killed_job",
    r"cluster/test_slurm_jobs",
    # one of each kind ends so besides, or is said to
    r"cluster/test_heartbeats.py::\S+\[1-(stop|leave)",
    r"cluster/test_mpi_installs.py::test_a_script_that_imports",
    r"launch/test_mpi_places.py::test_(a_launcher_that_is\S+\[with|mpis_server\S+\[cat)",
    r"launch/test_save_grace.py::test_it_says_that_nothing_was_saved\[write",
    r"communicators/test_create.py::test_(two_ranks_come_up|a_peer_that_dies)",
    r"communicators/test_measuring_once.py::test_(measured|a_strategy)\S+\[horovod",
    r"callbacks/test_batch_size.py::test_a_trial_leaves",
    r"callbacks/test_batch_norm_statistics.py::test_two_devices",
    r"callbacks/test_checkpoint.py::test_resumed_equals_uninterrupted_in_one_process\[steps-mirr",
    r"callbacks/test_evaluation.py::test_(the_rate_is_halved\S+\[collective|two_devices)",
    r"exchange/test_auto.py::test_once_enough",
    r"exchange/test_blocks.py::test_a_block_is_closed",
    r"exchange/test_exchange.py::test_kernels_of_dense_layers_on",
    r"exchange/test_factors.py::test_many_rows",
    r"layers/test_channel_parallel.py::test_divided_layers_equal_one_device\[collective-3",
    r"layers/test_whole.py::test_what_one_layout\S+-rows",
    r"strategies/test_grid.py::test_parts_are_clipped",  # layers/test_whole.py clips them, too
    r"strategies/test_saving.py::test_every_rank_may_save",
    r"strategies/test_served_features.py::test_(callbacks\[served-2-check|significant_entries)",
    r"strategies/test_served_features.py::test_(no_slot\S+-schedule|the_first_steps\S+epochs=1)",
    r"strategies/test_served_features.py::test_pushing_every_fourth\S+ \S+ \S+ \S+-\(\)",
    r"strategies/test_served_features.py::test_the_rate_of_asynchronous\S+linear",
    r"strategies/test_served_optimizers.py::test_what_needs\S+-(LAMB|LARS|lamb|muon|scaled|adafactor)",
    r"strategies/test_parameter_server.py::test_a_slow_worker\S+\[None",
    r"strategies/test_jit.py::test_two_ranks_with_fused",
    r"strategies/test_variables.py::\S+\[collective",
    r"strategies/test_served_steps.py::test_adversaries_whose",
    # an optimizer of each kind, and one way of training that Horovod's scripts take
    r"strategies/test_sharded_optimizer.py::test_equal_to_one_process\S+-(lars|muon|adamw)",
    r"migrate/test_horovod.py::test_two_ranks_end_as\S+\[(average|passes|clipped)",
    r"strategies/test_gpus.py::test_floats_go_from_gpu_to_gpu\S+False",
    r"strategies/test_served_steps.py::test_steps_that_need_no_update\S+compiled",
    # the same by another way of reading, or in another format
    r"inference/test_predict_to_disk.py::test_whatever_the_data_is_\S+\[(memory map|function)",
    r"inference/test_predict_to_disk.py::test_(half_precision|ranks_that_differ|devices_and|whatever\S+\[dataset)",
    r"inference/test_export.py::test_(several_inputs\S+\[(tf_saved|litert)|what_cannot|an_artifact|a_model_that)",
    r"inference/test_quantize.py::test_(litert_takes|a_student_of)",
    # The dearest of those whose rule a cheaper test holds, or another case of the same test: half
    # of `make test` was spent on one test in thirty.
    r"communicators/test_contract.py::test_(places|null_keeps|split_of_one\S*\[(mpi|horovod|nccl|collective-3))",
    r"communicators/test_contract.py::test_send_and_recv\[mpi-wheel-2-graph",
    r"communicators/test_mpi.py::test_a_rank_that_leaves",
    r"communicators/test_measuring_once.py::test_(what_is_no_costs|a_strategy)",
    r"strategies/test_cases.py::\S+\[mirrored-2-(layers that|summed|zipped|accumulation|model)",
    r"strategies/test_cases.py::\S+\[(collective-2-(several|single)|local-1-(evaluate|lists))",
    r"strategies/test_promises.py::test_(a_layer_that_was|every_row\S+\[5|custom_loops\[local)",
    # test_loop_guard.py has a loop between ranks; a loss that is scaled needs no second process
    r"strategies/test_promises.py::test_custom_loops\[collective-2",
    r"strategies/test_promises.py::test_(ranks_that_start|dropout_masks_differ_by_d|means_that_are)",
    r"strategies/test_sharded_optimizer.py::test_(files_hold|gradients_in_half|a_loop_of)",
    r"strategies/test_sharded_optimizer.py::test_equal_to_one_process\S+-(windows|adafactor|overflow)",
    r"strategies/test_moments.py::test_(between|devices_tell\S+-(all rows|frozen|eager|inference))",
    r"strategies/test_moments.py::test_devices_tell\S+-a replica's rows-0",
    r"strategies/test_self_test.py::test_(random_numbers\S+both|what_it_prints|without_it)",
    r"strategies/test_lookups.py::test_(lookups_of_which|places_that_are)",
    r"strategies/test_feeding.py::test_(rows_whose_rank|workers_of_a|three_epochs)",
    r"strategies/test_saving.py::test_(models_that|files_of_keras\S+\[mirrored)",
    r"strategies/test_parameter_server.py::test_features_of_fit",
    r"strategies/test_proximal.py::test_(the_norm|without_delay|mistakes_of\S+rate too high)",
    r"strategies/test_served_steps.py::test_steps_that_need_no_update\S+disjoint",
    r"strategies/test_served_features.py::test_(synchronous_workers|what_is_not_sig|pushing_every)",
    r"strategies/test_served_features.py::test_(fetching_less|callbacks|the_first_steps|random_layers)",
    r"strategies/test_served_features.py::test_no_slot",
    r"callbacks/test_checkpoint.py::test_(another_model|the_same_optimizer|a_run_that_stopped"
    r"|resumed_equals_uninterrupted_in)",
    r"callbacks/test_checkpoint_files.py::test_(a_process_killed|a_value_that)",
    r"callbacks/test_checkpoint_save_error.py::test_(a_process_that|by_default)",
    r"callbacks/test_checkpoint_background.py::test_(a_failure\S+collective|an_exception)",
    r"callbacks/test_checkpoint_on_sigterm.py::test_sigterm_during",
    r"callbacks/test_batch_size.py::test_(one_process_(and_the_order|has_no)|a_resumed_run\S+arrays|two_ranks\[|every_second)",
    r"callbacks/test_sample_rate.py::test_(a_growing_batch\S+nesterov|halving)",
    r"callbacks/test_learning_rate.py::test_(a_schedule_is_m|warm_up_equals\S+True)",
    r"callbacks/test_learning_rate.py::test_scaled_once_when\S+(BackupAndRestore-number|model-sched)",
    r"callbacks/test_keras_callbacks.py::test_(a_summary_holds|tensorboard|progress_on|everyone_starts)",
    r"callbacks/test_find_non_finite.py::test_(gradients_that_overflow|a_gradient_is_told)",
    r"callbacks/test_evaluation.py::test_(a_final_test|batches_larger)",
    r"layers/test_whole.py",
    r"layers/test_pipeline.py::test_what_some_ranks",
    r"layers/test_collectives.py::test_a_rank_whose_value",
    r"exchange/test_exchange.py::test_(half_precision_over|delayed_applies\S+float16)",
    r"exchange/test_auto.py::test_where_nothing",
    r"exchange/test_blocks.py::test_averaging",
    r"exchange/test_quantized.py::test_a_step_that",
    r"exchange/test_factors.py::test_few_rows",
    r"pipelines/test_moved_maps.py::test_ranks_train",
    r"data/test_shard.py::test_items_are",
    r"compat/test_random_draws.py::\S+recurrent",
    r"migrate/test_horovod.py::test_(ranks_shuffle|two_ranks_end\S+dataset)",
    r"search/test_study.py::test_an_exception",
    r"published/test_published.py",
    # strategies/test_equivalence.py has its equality, and README.md its own look of what is printed
    r"test_examples.py::test_the_demo",
    # examples that train most: callbacks/ has a test of each thing that they show
    r"data/test_docstrings.py::test_the_examples_run\S+callbacks\.(evaluation|batch_size|sample_rate"
    r"|checkpoint|reports)\]",
    # strategies/test_sharded_optimizer.py: one process saves, two go on and save, one goes on
    r"callbacks/test_checkpoint.py::test_another_world_size",
    r"test_networks.py::test_networks_have\S*\[bn-inception",
    # of one of dtk's optimizers each: what Keras does with all of them
    r"optimizers/test_in_keras.py::test_(moving_averages\S*\[lamb|a_saved_model\S+\[(lamb|rmsprop))",
    r"launch/test_job.py::test_children_of_a_rank_end_too\[3",
    r"strategies/test_served_features.py::test_every_gradient_is_applied_once\S+-async-None",
    r"documents/test_blocks.py::\S+(docs/(search|callbacks).md|--model resnet20)",
)
# Whole commands, which `make test-fast` leaves out as it does worlds of several processes.
COMMANDS = re.compile(
    r"cli/test_(bench|check|run|doctor|install)|launch/|published/|documents/test_blocks"
    r"|test_examples|test_benchmarks|strategies/test_(lost_tasks|evaluator|proximal|resolver|devices)"
    r"|strategies/test_gpus.py::test_(workers|groups)|strategies/test_mistakes.py::test_an?_|strategies/test_served_steps.py::\S*refused_step_ends"
    r"|communicators/test_create"
    r"|callbacks/test_(termination|checkpoint_files)|test_garbage|test_quiet|test_makefile|test_wheel|test_site|test_import_time|test_versions|search/test_study.py::test_the_job_ends|inference/\S+killed_job|cluster/test_(detect|slurm|mpi_installs|heartbeats)"
)
_FULL = re.compile("|".join(FULL))
# What `make test-gpus` leaves out: XLA does not run on pretended GPUs; errors are told twice there;
# over NCCL all messages have one order; and where Keras reads beyond the data, an optimizer on a
# CPU counts that step, one on a GPU may.
_NOT_ON_GPUS = re.compile(
    r"strategies/test_jit|strategies/test_mistakes.py::.+(jit set|under xla|pairs in one array)"
    r"|strategies/test_promises.py::test_weights_are_updated_as_soon"
    r"|callbacks/test_batch_size.py::test_two_ranks_train_as_one_process\[collective-2"
    r"|exchange/test_factors.py::test_(rows_of_tables_and_whole|nothing_waits)"
)


def is_full(name: str) -> bool:
    """Whether a test, named from tests/ on, is for `make test-all` only."""
    return _FULL.match(name) is not None


def is_for_gpus(name: str, world: tuple[str, int]) -> bool:
    """Whether `make test-gpus` runs a test: TensorFlow's collectives carry its messages."""
    if os.environ["DTK_TEST_GPUS"] == "real":  # ranks share a card; a rank has no second one
        return world[0] in ("collective", "nccl") and world != ("nccl", 1)
    return world[0] in ("collective", "nccl") and not _NOT_ON_GPUS.match(name)


def is_fast(name: str, world: tuple[str, int]) -> bool:
    """Whether a test runs in one process, and is no command."""
    return world in (("", 0), ("local", 1)) and not COMMANDS.match(name)
