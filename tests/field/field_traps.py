"""What traps a plugin inside Lightning: the order of its calls, its strategies, callbacks, command line and Fabric."""

from field_row import row

ORDER = [
    row(
        "Weights are copied before they are rounded: masters are the fp32 weights that the user made.",
        "lightning/test_checkpoints.py::test_checkpoint_during_training_holds_the_masters",
        "lightning/test_checkpoints.py::test_weights_after_fit_are_the_masters",
    ),
    row(
        "Validating, testing and predicting connect the optimizers of the last fit again, and nothing comes of it.",
        "lightning/test_fit_lifecycle.py::test_evaluation_in_between_does_not_change_training",
        "lightning/test_fit_lifecycle.py::test_evaluation_leaves_the_model_bit_identical",
    ),
    row(
        "Evaluating a checkpoint loads the plugin's state, too; the scale of the training goes on as it was.",
        "lightning/test_checkpoints.py::test_evaluating_a_checkpoint_leaves_the_live_scale",
    ),
    row(
        "The sanity check runs in inference mode before the first step and leaves no trace.",
        "lightning/test_field_training.py::test_the_sanity_check_leaves_no_trace",
    ),
    row(
        "A training step that draws its batches from the loader itself gets them as they are.",
        "lightning/test_field_training.py::test_a_training_step_that_draws_its_batches_itself",
    ),
    row(
        "Layers that setup() and configure_model() make are cast, trained and given back.",
        "lightning/test_odd_models.py::test_configure_model_and_setup_build_layers",
    ),
    row(
        "The last, short window of accumulated batches makes a step.",
        "lightning/test_levels_train.py::test_last_short_accumulation_window_steps",
        "lightning/test_callbacks.py::test_gradient_accumulation_scheduler",
    ),
    row(
        "No gradient, no step: without a backward pass an old gradient is not used again.",
        "lightning/test_manual.py::test_step_without_any_backward_changes_nothing",
        "lightning/test_fit_lifecycle.py::test_none_in_an_accumulation_window",
        "lightning/test_corners_of_use.py::test_a_hook_that_drops_the_gradients",
        "fabric/test_fabric_loops.py::test_no_gradient_no_step",
    ),
    row(
        "Manual optimization steps inside the forward context and clips before the step, through a wrapper.",
        "lightning/test_manual.py::test_manual_equals_automatic",
        "lightning/test_manual.py::test_manual_clip_is_on_unscaled_gradients",
        "lightning/test_manual.py::test_clip_without_a_step_is_forgotten_by_the_next_backward",
    ),
    row(
        "on_before_backward sees the loss that the training step returned.",
        "lightning/test_clipping.py::test_on_before_backward_sees_the_unscaled_loss",
    ),
    row(
        "A module's own configure_gradient_clipping may clip its parameters by itself.",
        "lightning/test_clipping.py::test_user_configure_gradient_clipping",
        "lightning/test_clipping.py::test_user_configure_gradient_clipping_may_call_clip_gradients",
    ),
    row(
        "LBFGS evaluates several times a step: refused where losses are scaled, allowed elsewhere.",
        "lightning/test_bad_input.py::test_lbfgs_is_refused",
        "lightning/test_bad_input.py::test_lbfgs_is_allowed_without_scaling_and_masters",
        "fabric/test_fabric_loops.py::test_lbfgs_is_refused_where_its_losses_are_scaled",
    ),
    row(
        "After a run, also one that failed, weights are fp32 and no hook is left.",
        "lightning/test_fit_lifecycle.py::test_nothing_is_left_on_the_module",
        "lightning/test_fit_lifecycle.py::test_exception_restores_everything",
        "lightning/test_odd_models.py::test_keyboard_interrupt_restores_fp32",
    ),
]

MASTERS = [
    row(
        "A master counts only where its parameter is its rounding: what anybody wrote to the model wins.",
        "lightning/test_fit_lifecycle.py::test_weights_written_by_a_user_during_training_win",
        "test_masters.py::TestReconcile::test_where_someone_wrote_the_models_value_counts",
        "test_fused_step.py::test_a_parameter_that_somebody_wrote_replaces_its_master",
    ),
    row(
        "Files of weights alone, for which no plugin is asked, hold fp32 weights bit for bit.",
        "lightning/test_checkpoints.py::test_checkpoint_during_training_holds_the_masters",
        "test_cast_module.py::TestStateDict::test_is_what_it_was_before_the_cast_bit_for_bit",
    ),
    row(
        "A state that is loaded in the middle of a run reaches the masters, as lr_find does it.",
        "test_cast_module.py::TestStateDict::test_load_reaches_the_masters_bit_for_bit",
        "test_cast_module.py::TestStateDict::test_a_restore_of_an_earlier_copy_as_lr_find_does_it",
    ),
    row(
        "toggle_optimizer, finetuning callbacks and zero_grad work, because groups hold the module's own parameters.",
        "lightning/test_manual.py::test_gan_equals_fp32",
        "lightning/test_callbacks.py::test_backbone_finetuning",
        "lightning/test_field_training.py::test_neither_step_nor_groups_of_an_optimizer_are_replaced",
    ),
    row(
        "An optimizer that serves several fits, as the command line's does, trains in each.",
        "lightning/test_cli.py::test_the_clis_optimizer_is_reused_by_a_second_fit",
        "lightning/test_fit_lifecycle.py::test_fit_twice_at_different_levels",
        "lightning/test_fit_lifecycle.py::test_same_trainer_or_plugin_fits_two_models",
    ),
    row(
        "One plugin in two Trainers at once is refused.",
        "lightning/test_corners_of_use.py::test_one_plugin_in_a_second_trainer_at_once_is_refused",
    ),
    row(
        "Copies made while training own their weights.",
        "lightning/test_fit_lifecycle.py::test_copies_made_during_training_own_their_weights",
        "test_cast_undone.py::TestCopies::test_own_their_weights",
    ),
    row(
        "Tied weights stay one parameter with one master.",
        "lightning/test_models.py::test_tied_weights_stay_one_parameter",
        "lightning/test_corners_of_use.py::test_weights_tied_after_the_cast_are_saved_as_their_master",
    ),
]

CALLBACKS = [
    row(
        "Stochastic weight averaging, which makes a step without a backward pass, ends as in fp32.",
        "lightning/test_averaging.py::test_stochastic_weight_averaging",
    ),
    row(
        "Weight averaging averages fp32 weights, and validation does not round the average.",
        "lightning/test_averaging.py::test_default_average_is_the_mean_of_fp32_weights",
        "lightning/test_averaging.py::test_ema_is_that_of_fp32_weights",
        "lightning/test_averaging.py::test_lightnings_ema_callback",
    ),
    row(
        "Models that torch.compile wraps whole, in part or in place train as others.",
        "lightning/test_callbacks.py::test_torch_compile",
    ),
    row(
        "LearningRateMonitor finds schedulers by their names; they are of their own class afterwards, and pickle.",
        "lightning/test_callbacks.py::test_learning_rate_monitor",
        "lightning/test_schedulers.py::test_schedulers_keep_their_class_afterwards",
        "lightning/test_corners_of_use.py::test_a_scheduler_pickles_during_training",
    ),
    row(
        "plugin.precision is one of Lightning's strings, for all who read it.",
        "lightning/test_levels_train.py::test_precision_names_lightnings_nearest",
        "lightning/test_callbacks.py::test_model_summary",
        "lightning/test_field_saving.py::test_throughput_monitor_runs",
    ),
    row(
        "Only plain values are in the plugin's state: a checkpoint loads without running code.",
        "lightning/test_field_saving.py::test_a_checkpoint_loads_without_running_code",
        "test_scaler_state.py::test_has_grad_scalers_keys_and_plain_numbers",
        "test_scaler_state.py::test_a_weights_only_load_reads_it",
    ),
    row(
        "Lightning keeps a plugin's state under its class's name: a subclass takes it over, and the other package too.",
        "lightning/test_field_saving.py::test_a_subclass_takes_over_the_state_of_the_plugin",
        "pl/test_pl_fit.py::test_what_one_package_saved_the_other_resumes",
    ),
    row(
        "The plugin is no container and always true.",
        "lightning/test_field_training.py::test_lightning_may_ask_a_plugin_whether_it_is_there",
    ),
    row(
        "Two precision plugins, or one beside precision=, are an error.",
        "lightning/test_bad_input.py::test_two_precision_plugins",
        "lightning/test_bad_input.py::test_precision_beside_the_plugin",
    ),
]

STRATEGIES = [
    row(
        "DDP ignores what convert_module returns, and has hooked parameters by then: modules are cast in place.",
        "test_cast_module.py::TestCasting::test_in_place",
        "lightning/test_ddp.py::test_equals_one_process_on_the_whole_batch",
    ),
    row(
        "An infinity on one rank skips the step on all, and their scales stay equal.",
        "lightning/test_ddp.py::test_an_inf_on_one_rank_skips_on_both",
        "fabric/test_fabric_ddp.py::test_an_overflow_on_one_rank_skips_the_step_on_both",
    ),
    row(
        "A worker process that Lightning starts gives fp32 weights back.",
        "lightning/test_ddp.py::test_ddp_spawn",
        "pl/test_pl_installations.py::test_two_processes",
    ),
    row(
        "Strategies that cast or shard the model themselves are refused with what to use instead.",
        "lightning/test_strategies.py::test_fsdp_is_refused",
        "lightning/test_strategies.py::test_lightnings_refusal_beside_fsdp_says_what_to_use",
        "lightning/test_strategies.py::test_strategies_that_cast_models_themselves_are_refused",
    ),
    row(
        "FSDP2 shards after the plugin was asked: the model trains as in one process, and ranks skip together.",
        "lightning/test_model_parallel.py::test_equals_the_same_steps_in_one_process",
        "lightning/test_model_parallel.py::test_an_infinity_in_one_shard_skips_the_step_of_all",
        "lightning/test_model_parallel_checkpoints.py::test_2n_steps_equal_n_save_load_n",
        "fabric/test_fabric_model_parallel.py::test_processes_stay_equal_and_equal_one_process",
    ),
    row(
        "A strategy that ignores the plugin for BatchNorm is warned of.",
        "lightning/test_sync_batchnorm_plugin.py::test_a_strategy_that_ignores_it_is_warned_of",
    ),
    row(
        "sync_batchnorm=True beside the plugin is allowed.",
        "lightning/test_sync_batchnorm.py::test_equals_one_process_on_the_whole_batch",
        "lightning/test_strategies.py::test_sync_batchnorm_beside_the_plugin_on_one_device",
    ),
    row(
        "Synchronised BatchNorm keeps parameters, buffers, their order and the user's classes.",
        "parallel/test_convert_syncbn.py::test_everything_keeps_its_identity_and_comes_back",
        "parallel/test_convert_syncbn.py::test_an_optimizer_made_before_trains_it",
        "lightning/test_sync_batchnorm.py::test_checkpoints_have_batchnorms_keys_and_resume_bit_for_bit",
    ),
    row(
        "Fused optimizers do not keep Lightning's own precision from clipping.",
        "lightning/test_field_training.py::test_our_optimizers_train_under_lightnings_own_precision_with_clipping",
    ),
]

COMMAND_LINE = [
    row(
        "Class paths need no import in the script, short names only that of the package.",
        "lightning/test_cli_lines.py::test_the_plugin_and_an_optimizer",
        "lightning/test_cli_lines.py::test_short_names_once_the_package_is_imported",
        "lightning/test_cli_lines.py::test_two_plugins",
    ),
    row(
        "Every argument has its type, default and text in the help.",
        "lightning/test_cli_help.py::test_every_argument_with_type_default_and_text",
    ),
    row(
        "A wrong level on the command line is said in one sentence.",
        "lightning/test_cli.py::test_wrong_level_is_an_error",
        "lightning/test_apex_cli.py::test_a_wrong_level",
    ),
    row(
        "Environment variables set what the command line leaves out.",
        "lightning/test_apex_cli.py::test_environment_variables",
    ),
    row(
        "What print_config writes reloads.",
        "lightning/test_cli.py::test_print_config_reloads",
    ),
    row(
        "Optimizers from the command line have typed arguments and touch no device when they are made.",
        "lightning/test_cli.py::test_optimizer_from_the_command_line",
        "test_registration.py::test_one_openmp_runtime_and_no_cuda_context",
    ),
]

FABRIC = [
    row(
        "Fabric takes its own plugin; the Trainer's is refused with the name of the right one.",
        "fabric/test_fabric_loops.py::test_the_trainers_plugin_is_refused_with_the_name_of_the_right_one",
        "pl/test_pl_wrong_import.py::test_a_trainers_plugin_in_fabric",
    ),
    row(
        "Fabric takes no plugin for BatchNorm and says whose it is.",
        "pl/test_pl_wrong_import.py::test_what_is_no_plugin_of_fabrics",
    ),
    row(
        "Fabric ignores what the hooks around backward return: losses are scaled in backward itself.",
        "fabric/test_fabric_levels.py::test_clipping_does_not_depend_on_the_loss_scale",
        "fabric/test_fabric_loops.py::test_loss_backward_is_refused",
    ),
    row(
        "fabric.save with the plugin saves the scale.",
        "fabric/test_fabric_checkpoints.py::test_a_resumed_run_equals_one_without_interruption",
    ),
]

PACKAGES = [
    row(
        "A class that inherits from both of Lightning's packages clips nothing: there is one a package, and it clips.",
        "pl/test_pl_fit.py::test_a_class_belongs_to_one_package",
        "pl/test_pl_fit.py::test_clipping_really_clips",
        "pl/test_pl_fit.py::test_manual_clipping_really_clips",
    ),
    row(
        "Where only one of the packages is installed, its plugins work.",
        "pl/test_pl_installations.py::test_only_pytorch_lightning",
        "pl/test_pl_installations.py::test_only_lightning",
    ),
    row(
        "Importing the package imports no Lightning that nobody asked for, and works without any.",
        "pl/test_pl_installations.py::test_the_package_imports_the_other_one_only_when_asked",
        "test_import.py::test_without_lightning_everything_but_the_plugins_works",
    ),
]

TRAPS = [*ORDER, *MASTERS, *CALLBACKS, *STRATEGIES, *COMMAND_LINE, *FABRIC, *PACKAGES]
