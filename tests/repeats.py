"""Cases that show at another size, or in another way, what a case beside them shows.

They take a good part of the time of all tests. `make test` leaves them out, like everything marked `proof`; `make
proofs` runs them.
"""

from __future__ import annotations

REPEATS = {
    "tests/checkpoint/test_model_files.py::test_a_language_model_loads_after_import_tfpar": (
        "import keras; import tfpar",
        "import tfpar; tfpar.DistributedOptimizer; import keras",
    ),
    "tests/drop_in/test_drop_in.py::test_repeated_tokens_are_summed_on_one_worker_too": (
        "<lambda>0-True",
        "<lambda>2-False",
        "<lambda>3-False",
        "<lambda>4-True",
    ),
    "tests/drop_in/test_drop_in.py::test_saved_it_loads_as_the_plain_optimizer_and_goes_on": (
        "<lambda>0",
        "<lambda>1",
        "<lambda>3",
    ),
    "tests/faults/test_partition.py::test_heartbeats_do_not_wait_behind_gradients": (),
    "tests/faults/test_servers.py::test_the_chief_names_who_is_lost_and_ends": ("ps-19",),
    "tests/faults/test_servers.py::test_who_does_not_come_is_named": ("ps-absent1",),
    "tests/guards/test_bad_examples.py::test_fail_names_the_example_and_no_graph": ("memory",),
    "tests/guards/test_bad_examples.py::test_skip_counts_the_same_in_every_layout": ("one_device-memory",),
    "tests/guards/test_interruption.py::test_ctrl_c_ends_a_run_with_a_line_on_how_to_resume": ("launcher0",),
    "tests/incremental/test_learner.py::test_methods_keep_more_than_nothing": ("joint", "lwf"),
    "tests/inputs/sources/test_class_weights.py::test_weights_go_through_a_pipeline_of_files_and_through_skipping": (
        "memory",
    ),
    "tests/inputs/sources/test_tables.py::test_tables_are_written_as_shards_and_read_again": (
        "-memory",
        "?label=kind&weight=heavy-none",
        "?label=price&as=vector-memory",
        "?label=price,kind&columns=city-none",
    ),
    "tests/inputs/test_bad_records.py::test_a_file_that_is_truncated_or_deleted_during_reading": ("256",),
    "tests/inputs/test_bad_records.py::test_damaged_images_are_named_or_skipped": ("memory",),
    "tests/inputs/test_bad_records.py::test_damaged_tfds_records_are_named_or_skipped": ("tfrecord",),
    "tests/inputs/test_bad_records.py::test_damaged_tfrecords_are_named_or_skipped": ("none",),
    "tests/inputs/test_streams.py::test_elements_are_those_of_arrays": (
        "1-1-1-0",
        "1-1-1-1",
        "1-1-1-8",
        "1-1-1-23",
        "1-1-3-0",
        "1-1-3-1",
        "1-1-3-8",
        "1-1-3-23",
        "3-1-1-0",
        "3-1-1-1",
        "3-1-1-8",
        "3-1-1-23",
        "3-3-1-0",
        "3-3-1-1",
        "3-3-1-8",
        "3-3-1-23",
    ),
    "tests/inputs/test_streams.py::test_later_passes_keep_their_order": (
        "cache-2",
        "examples-2",
        "files-0",
    ),
    "tests/integration/test_bad_records.py::test_workers_of_parameter_servers_skip_too": (),
    "tests/integration/test_exchange.py::test_sums_over_workers": ("2-1", "2-2", "4-1", "5-1", "8-1"),
    "tests/integration/test_exchange_rows.py::test_rows_between_workers": (
        "1-2",
        "2-1",
        "2-2",
    ),
    "tests/integration/test_experiments.py::test_a_stopped_and_resumed_run_gives_the_bits_of_one_that_was_not": (
        "1-exchanges0-True",
        "2-exchanges2-False",
    ),
    "tests/integration/test_experiments.py::test_fine_tuning_changes_the_weights_that_it_is_told": ("all-changed2",),
    "tests/integration/test_language_model.py::test_held_out_files_take_few_bits_per_byte": ("2-60-4.0",),
    "tests/integration/test_multi_worker.py::test_two_workers_equal_one_device": ("1-1", "1-4", "2-1"),
    "tests/integration/test_multi_worker.py::test_workers_that_were_not_given_the_same_say_so_before_the_first_step": (
        "nothing-named3",
    ),
    "tests/integration/test_pipeline.py::test_four_workers_hold_a_pipeline": (),
    "tests/integration/test_pipeline.py::test_four_workers_hold_two_pipelines": (),
    "tests/integration/test_pipeline.py::test_two_workers_of_two_stages": (),
    "tests/integration/test_readme.py::test_alone": (),
    "tests/integration/test_readme.py::test_objects_made_too_early_are_a_plain_error": ("2",),
    "tests/integration/test_resuming.py::test_damage_that_one_worker_finds_takes_all_to_the_checkpoint_before": ("3",),
    "tests/integration/test_sharded.py::test_devices_that_divide_the_state_equal_one": ("lamb-gradients",),
    "tests/integration/test_sharded.py::test_three_workers_equal_one_device": (),
    "tests/integration/test_tensor_parallel.py::test_two_workers_of_two_devices": (),
    "tests/integration/test_wire_bytes.py::test_the_counter_of_the_interface_agrees_with_the_formula": (
        "3-exchanges1",
    ),
    "tests/launch/test_hosts.py::test_the_printed_commands_run": ("1",),
    "tests/models/test_families.py::test_gradients_are_the_same_with_and_without_xla": ("resnet50", "convnet"),
    "tests/models/test_summary.py::test_costs_match_published_models": ("vit_base-86567656-35.1",),
    "tests/optim/test_optimizers.py::test_pure_apply_in_replicas_with_local_copies": (
        "adadelta",
        "adagrad",
        "adamax",
        "adamw",
        "ftrl",
        "lars",
        "lion",
        "rmsprop",
    ),
    "tests/rl/test_dqn.py::test_two_replicas_learn_what_one_does": ("0.0",),
    "tests/rl/test_trainer.py::test_a_resumed_run_goes_on_bit_by_bit": ("8",),
    "tests/tfpar_ops/test_build.py::test_a_wheel_carries_the_library": (),
    "tests/tfpar_ops/test_formats.py::test_a_new_format_works_with_nothing_else_changed": (),
    "tests/training/loops/test_hooks.py::test_hooks_change_nothing_but_what_they_say": ("2",),
    "tests/training/loops/test_keras_callbacks.py::test_a_metric_that_is_monitored_says_what_is_better": (
        "val_accuracy-1.0-kind1-monitor_op",
        "val_accuracy-1.0-kind2-monitor_op",
        "accuracy-1.0-kind0-monitor_op",
        "accuracy-1.0-kind2-monitor_op",
        "val_loss--1.0-kind0-monitor_op",
        "val_loss--1.0-kind1-monitor_op",
    ),
    "tests/training/loops/test_keras_callbacks.py::test_calls_and_logs_are_those_of_keras": (
        "Recorder-2",
        "BatchRecorder-1",
        "StoppingRecorder-2",
    ),
    "tests/training/loops/test_keras_callbacks.py::test_the_callbacks_that_people_use": ("2",),
    "tests/training/model/test_adapting.py::test_weights_that_a_pattern_finds_are_trained": ("last-expected0",),
    "tests/training/model/test_building.py::test_averages_of_an_optimizer_object_are_left_as_keras_leaves_them": ("1",),
    "tests/training/model/test_building.py::test_layers_are_frozen_and_unfrozen_between_two_fits": ("1",),
    "tests/training/model/test_call.py::test_a_loss_object_in_the_forward_pass_counts_once_on_any_number_of_replicas": (
        "1",
    ),
    "tests/training/model/test_call.py::test_weights_that_the_forward_pass_assigns_are_those_of_keras": (
        "1-1-True",
        "1-4-False",
    ),
    "tests/training/model/test_foreign_models.py::test_three_steps_give_the_numbers_of_fit": ("mobile_net",),
    "tests/training/model/test_keras_hub.py::test_an_epoch_gives_the_numbers_of_fit": ("gpt2-model:2", "bert-model:2"),
    "tests/training/model/test_own_loss.py::test_a_given_loss_replaces_that_of_a_compiled_model": ("1",),
    "tests/training/model/test_own_loss.py::test_an_overridden_loss_gives_the_numbers_of_fit": (
        "own_loss-None-1-1",
        "extended-mse-1-1",
    ),
    "tests/training/model/test_own_loss.py::test_metrics_that_the_model_updates_are_counted": ("1-1", "1-2"),
    "tests/training/model/test_precision.py::test_float8_layers_train_as_in_keras": ("1-True", "2-False"),
    "tests/training/model/test_precision.py::test_float8_statistics_of_a_batch_that_is_not_full_are_those_of_keras": (
        "8",
    ),
    "tests/training/model/test_precision.py::test_micro_batches_keep_the_maximum_of_float8_statistics": ("True",),
    "tests/training/model/test_precision.py::test_mixed_float16_trains_with_every_optimizer": (
        *("adadelta", "adagrad", "adam", "adamax", "ftrl", "lamb", "lars", "lion", "muon", "nadam", "rmsprop"),
    ),
    "tests/training/model/test_recompute.py::test_a_run_ends_with_the_same_weights": ("options1",),
    "tests/training/model/test_recompute.py::test_loss_gradients_and_state_stay": (
        "attention_with_masks_and_dropout-blocks-blocks1-True",
        "convolutions_with_batch_statistics-blocks-blocks4-True",
    ),
    "tests/training/model/test_whole_batches.py::test_a_batch_that_is_not_full_gives_the_numbers_of_keras": (
        "compute_loss-1-false",
        "add_loss-1-false",
        "batch_statistics-1-false",
        "own_metric-1-false",
    ),
    "tests/training/model/test_whole_losses.py::test_an_epoch_gives_the_numbers_of_fit": (
        "images-mean_square-1-options0",
        "images-loss4-1-options4",
        "numbers-mse-1-options6",
    ),
    "tests/training/planning/test_counting.py::test_predicted_bytes_are_those_that_devices_hold": (
        "pipeline:2,model:2-4-options1",
    ),
    "tests/training/test_evaluation.py::test_equals_keras_evaluate": ("1-False", "3-True"),
    "tests/training/test_evaluation.py::test_evaluation_has_batches_of_its_own_and_may_be_cut_short_during_training": (
        "1",
    ),
    "tests/training/test_evaluation.py::test_moving_averages_are_saved_and_the_run_keeps_its_own_weights": ("1",),
    "tests/training/test_evaluation.py::test_moving_averages_are_what_is_evaluated": ("1",),
    "tests/training/test_goals.py::test_a_mask_on_outputs": ("xla",),
    "tests/training/test_goals.py::test_a_model_without_labels_that_adds_its_loss": ("1",),
    "tests/training/test_goals.py::test_a_weight_for_each_position": (
        "unmasked-sum_over_batch_size",
        "unmasked-mean_with_sample_weight",
        "tagger-sum",
    ),
    "tests/training/test_goals.py::test_outputs_of_different_denominators": ("xla",),
    "tests/training/test_goals.py::test_two_heads_by_name": ("xla",),
    "tests/training/test_keras_defects.py::test_one_replica_that_overflows_stops_the_update_on_all": (
        "False-0",
        "True-0",
        "True-1",
    ),
    "tests/training/test_layouts.py::test_mirrored_equals_one_device": ("2-1", "3-1", "3-4"),
    "tests/training/test_like_fit.py::test_evaluations_average_over_batches": (
        "1-masked_and_plain-two_labels-<lambda>",
        "2-model-data-summed",
        "2-masked-tokens-<lambda>",
    ),
    "tests/training/test_offload.py::test_the_same_bits_as_on_the_device": ("adafactor",),
    "tests/training/test_pipeline.py::test_layers_of_stages_are_divided": ("language_model-options1",),
    "tests/training/test_pipeline.py::test_stages_are_xla_programs": ("options0", "options1"),
    "tests/training/test_pipeline.py::test_thirty_steps_equal_one_device": (
        *(
            "dense-2-options0",
            "dense-3-options1",
            "recurrent-2-options5",
            "vit-2-options3",
            "language_model-4-options2",
            "resnet-3-options4",
            "branches-4-options6",
            "batch_statistics-2-options7",
        ),
    ),
    "tests/training/test_prediction.py::test_equals_keras_predict": (
        "1-True",
        "3-False",
    ),
    "tests/training/test_step.py::test_finite_gradients_whose_squares_overflow_are_applied": (
        "0.0-1-False",
        "0.0-2-True",
        "1.0-1-True",
        "1.0-2-False",
    ),
    "tests/training/test_step.py::test_several_steps_a_call_equal_single_ones": ("False-2", "True-1"),
    "tests/training/test_streams.py::test_a_run_resumes_where_it_stopped_in_the_stream": ("2",),
    "tests/training/test_streams.py::test_trains_and_evaluates_as_arrays_and_as_keras_do": ("1",),
    "tests/training/test_tensor_parallel.py::test_micro_batches": ("model:2-none", "data:2,model:2-none"),
    "tests/training/test_tensor_parallel.py::test_thirty_steps_equal_one_device": (
        *("dense-2-0.4", "attention-2-0.4", "vit-4-0.6", "batch_statistics-4-0.6"),
    ),
    "tests/training/test_trainer_resuming.py::test_a_run_with_objects_and_a_runtime_resumes": ("options0",),
    "tests/training/test_trainer_resuming.py::test_stopped_and_resumed_gives_the_bits_of_a_run_that_was_not": (
        "moving averages",
        "plateau",
        "xla",
    ),
    "tests/training/test_trainer_resuming.py::"
    "test_the_training_loss_is_that_of_the_last_epoch_also_after_resuming_with_more": ("1000",),
}


def repeats() -> set[str]:
    """The ids of these cases."""
    return {f"{name}[{case}]" if case else name for name, cases in REPEATS.items() for case in (cases or ("",))}
