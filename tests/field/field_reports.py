"""What people have reported to Lightning and to others of all else, as the behaviour that is right here."""

from field_row import row

SAVING = [
    row(
        "A run with masters that is saved resumes and goes on.",
        "lightning/test_checkpoints.py::test_2n_steps_equal_n_save_load_n",
        issue=11488,
    ),
    row(
        "Scale, growth counter and skips survive saving and loading.",
        "lightning/test_checkpoints.py::test_scale_state_is_in_the_checkpoint",
        "test_scaler_state.py::test_a_round_trip_goes_on_with_the_same_scales",
        issue=11885,
    ),
    row(
        "The plugin's state may be loaded before and after a fit.",
        "lightning/test_field_saving.py::test_the_plugins_state_may_be_loaded_at_any_time",
        issue=6097,
    ),
    row(
        "A second fit meets no state of another type.",
        "lightning/test_fit_lifecycle.py::test_fit_twice_all_pairs",
        "lightning/test_fit_lifecycle.py::test_same_optimizer_twice_equals_one_long_run",
        issue=16303,
    ),
    row(
        "Step counts of a resumed optimizer are where the optimizer wants them.",
        "lightning/test_checkpoints.py::test_resume_from_the_middle_of_an_epoch",
        "optimizers/test_state_dicts.py::TestThereAndBack::test_the_next_steps_are_the_same_bits",
        "test_cuda.py::test_a_step_is_one_launch_a_pass_and_nothing_waits",
        issue=(13612, 19955),
    ),
    row(
        "An optimizer of layers that setup() makes resumes.",
        "lightning/test_field_saving.py::test_layers_made_in_setup_resume",
        issue=7535,
    ),
    row(
        "Fabric: an optimizer's state that was loaded before setup is kept.",
        "fabric/test_fabric_checkpoints.py::test_an_optimizer_with_state_is_set_up",
        issue=19225,
    ),
    row(
        "Resuming with masters shows no jump of the loss; an fp32 checkpoint goes on at any level.",
        "lightning/test_checkpoints.py::test_2n_steps_equal_n_save_load_n",
        "lightning/test_checkpoints.py::test_native_checkpoint_resumes_and_back",
        "amp/test_amp_checkpoints.py::test_any_level_loads_any_other",
        url="https://github.com/NVIDIA/apex/issues/180 https://github.com/NVIDIA/apex/issues/250",
    ),
    row(
        "An optimizer shows its state.",
        "lightning/test_field_saving.py::test_an_optimizer_shows_its_state",
        url="https://github.com/kozistr/pytorch_optimizer/issues/326",
    ),
]

TRAINER = [
    row(
        "Integers and booleans in a batch are never cast.",
        "lightning/test_field_training.py::test_a_batch_is_cast_before_it_moves_and_integers_never",
        "test_cast_tree.py::TestCastTree::test_other_kinds_of_tensors_stay",
        issue=10371,
        pull=10429,
    ),
    row(
        "Float inputs meet half weights, also those of recurrent modules.",
        "lightning/test_models.py::test_recurrent_norm_and_prelu_with_fp32_inputs",
        "test_boundaries.py::test_an_fp32_input_meets_half_weights",
        issue=2239,
    ),
    row(
        "A batch is cast before it moves to the device.",
        "lightning/test_field_training.py::test_a_batch_is_cast_before_it_moves_and_integers_never",
        pull=17728,
    ),
    row(
        "lr_find and scale_batch_size run at every level.",
        "lightning/test_callbacks.py::test_lr_find_restores_weights_and_scale",
        "lightning/test_field_saving.py::test_scale_batch_size",
        issue=(2804, 2655, 1827),
    ),
    row(
        "A fit after lr_find starts from the weights, the scale and the schedule of before.",
        "lightning/test_callbacks.py::test_lr_find_restores_weights_and_scale",
        issue=12670,
    ),
    row(
        "lr_find with an optimizer that the command line made.",
        "lightning/test_field_saving.py::test_lr_find_with_an_optimizer_of_the_cli",
        issue=16787,
    ),
    row(
        "What is changed in trainer.optimizers is seen through self.optimizers() and counts.",
        "lightning/test_field_training.py::test_what_a_user_changes_in_the_trainers_optimizers_counts",
        issue=18279,
    ),
    row(
        "A scaler of one's own is accepted.",
        "lightning/test_field_training.py::test_a_plugins_scaler_is_its_own_and_may_be_replaced",
        issue=19803,
    ),
    row(
        "global_step with two optimizers in manual optimization is what it is without the plugin.",
        "lightning/test_manual.py::test_gan_equals_fp32",
        "lightning/test_manual.py::test_only_one_of_two_optimizers_stepped",
        issue=17958,
    ),
    row(
        "Complex buffers stay complex.",
        "lightning/test_models.py::test_buffers_that_are_no_floats_and_loss_buffers",
        "test_casting.py::TestCastableTensors::test_only_fp32_tensors_are_cast",
        pull=8208,
    ),
    row(
        "An exception in a step leaves the default type, autocast and the model as they were.",
        "lightning/test_fit_lifecycle.py::test_exception_restores_everything",
        "test_engine.py::TestForward::test_a_model_that_raises_leaves_global_state_alone",
        pull=18500,
    ),
    row(
        "Mixing Lightning's two packages is an error that names the right import.",
        "pl/test_pl_wrong_import.py::test_in_a_trainer_of_the_other_package",
        "pl/test_pl_wrong_import.py::test_callback_in_a_trainer_of_the_other_package",
        "pl/test_pl_wrong_import.py::test_in_fabric_of_the_other_package",
        issue=19252,
    ),
]

SYNC_BATCH_NORM = [
    row(
        "Validating and testing convert nothing, and after a fit the classes are those of before.",
        "lightning/test_sync_batchnorm.py::test_equals_one_process_on_the_whole_batch",
        "lightning/test_sync_batchnorm_plugin.py::test_the_plugin_is_torchs_and_exact_both_ways",
        issue=9243,
        pull=11078,
    ),
    row(
        "Conversion works wherever the model is.",
        "parallel/test_convert_syncbn.py::test_everything_keeps_its_identity_and_comes_back",
        "parallel/test_sync_batch_norm_alone.py::test_trains_as_batchnorm_on_a_gpu",
        pull=6838,
    ),
    row(
        "A synchronised BatchNorm of one's own through plugins, as good as torch's.",
        "lightning/test_sync_batchnorm.py::test_equals_one_process_on_the_whole_batch",
        "lightning/test_sync_batchnorm_plugin.py::test_a_layer_sync_of_the_users_own_wins",
        issue=4349,
        pull=11754,
    ),
    row(
        "DDP with the sanity check and then training does not hang.",
        "lightning/test_sync_batchnorm.py::test_equals_one_process_on_the_whole_batch",
        "parallel/test_sync_batch_norm_ranks.py::test_eval_waits_for_nobody",
        issue=11910,
    ),
]

COMMAND_LINE = [
    row(
        "The plugin in trainer_defaults is accepted, and a saved config reloads.",
        "lightning/test_cli.py::test_trainer_defaults",
        "lightning/test_cli.py::test_saved_config_reloads",
        issue=8262,
    ),
    row(
        "A strategy by its class path, without an import in the script.",
        "lightning/test_cli_lines.py::test_the_strategy",
        issue=19682,
    ),
    row(
        "A strategy's other arguments come from the command line and from a config.",
        "lightning/test_sync_batchnorm_plugin.py::test_the_strategy_class_from_the_command_line",
        "lightning/test_sync_batchnorm_plugin.py::test_a_saved_config_reloads",
        url="https://github.com/ray-project/ray_lightning/issues/151",
    ),
]

REPORTS = [*SAVING, *TRAINER, *SYNC_BATCH_NORM, *COMMAND_LINE]
