"""What people have met with opt levels, loss scaling and fused optimizers, in whatever package."""

from field_row import row

LOSS_SCALE = [
    row(
        "Gradients that are never finite: the scale stops at its floor, never at 0, and after max_consecutive_skips "
        "the run ends with the names of the bad parameters.",
        "lightning/test_overflow.py::test_gives_up_and_names_the_parameters",
        "test_scaler.py::TestTheScale::test_never_falls_below_its_floor_and_reaches_it",
        "test_overflow_reports.py::TestGivingUp::test_a_model_that_is_never_finite_names_its_parameters",
        "amp/test_amp_overflow.py::test_the_run_ends_when_nothing_helps",
    ),
    row(
        "A floor below 1 is reached; a floor of 0 is an error and not ignored.",
        "lightning/test_overflow.py::test_floor_is_reached_and_held",
        "amp/test_amp_overflow.py::test_the_floor_is_reached_and_kept",
        "test_scaler_state.py::TestArguments::test_a_bad_value_is_named",
        "lightning/test_bad_input.py::test_wrong_scaler_argument",
    ),
    row(
        "With a scale below 1 and half gradients, unscaling may overflow on the way out: that is an overflow.",
        "test_ops.py::test_overflow_on_the_way_out_counts",
        "test_scaler.py::TestSkippedSteps::test_an_overflow_of_the_unscaling_itself_counts",
    ),
    row(
        "A skipped step leaves parameters, moments, step counts and schedulers as they were.",
        "lightning/test_overflow.py::test_skipped_step_changes_nothing",
        "test_scaler.py::TestSkippedSteps::test_change_nothing_bit_for_bit",
        "test_step.py::test_a_skipped_step_changes_nothing",
        "test_simt_steps.py::test_an_overflow_writes_nothing",
    ),
    row(
        "BatchNorm's statistics are kept from a bad batch by a training step that returns None.",
        "lightning/test_field_training.py::test_a_bad_batch_that_is_dropped_does_not_reach_batch_norms_statistics",
    ),
    row(
        "Half weights with Adam's default eps stay finite: eps and moments are fp32.",
        "test_engine.py::TestOptimizers::test_o3_with_fused_adam_stays_finite",
        "optimizers/test_corners.py::TestHalfParameters::test_fp16_with_the_default_eps_stays_finite",
    ),
    row(
        "An overflow on the very first step with momentum: the next step is that of a new optimizer.",
        "test_scaler.py::TestSkippedSteps::test_on_the_very_first_step",
        "lightning/test_overrides.py::test_torchs_fused_optimizers_skip_an_overflow_on_the_first_step",
    ),
]

SYNC_BATCH_NORM = [
    row(
        "Evaluation with (N, C), with channels last, with fuse_relu and with z.",
        "parallel/test_sync_batch_norm_alone.py::test_evaluates_as_batchnorm",
    ),
    row(
        "Without running statistics and without affine parameters, training and evaluating.",
        "parallel/test_sync_batch_norm_alone.py::test_trains_as_batchnorm",
        "parallel/test_sync_batch_norm_alone.py::test_evaluates_as_batchnorm",
    ),
    row(
        "Ranks with 1 and 7 samples equal BatchNorm over the 8.",
        "parallel/test_sync_batch_norm_ranks.py::test_two_ranks",
        "test_batch_norm_ops.py::test_ranks_together_are_one_batch",
    ),
    row(
        "One value on one rank is no error; one value on all ranks together is, before any statistics change.",
        "parallel/test_sync_batch_norm_ranks.py::test_one_value_over_all_ranks_is_an_error_on_each_before_anything_changes",
        "parallel/test_sync_batch_norm_alone.py::test_a_single_value_is_an_error_before_anything_changes",
    ),
    row(
        "Half input meets fp32 parameters, and the output has the input's type.",
        "parallel/test_sync_batch_norm_alone.py::test_trains_as_batchnorm",
        "parallel/test_sync_batch_norm_alone.py::test_under_autocast_the_output_has_the_inputs_type",
    ),
    row(
        "InstanceNorm is left alone, num_batches_tracked survives, momentum=None is a cumulative average.",
        "parallel/test_convert_syncbn.py::test_everything_keeps_its_identity_and_comes_back",
        "parallel/test_convert_syncbn.py::test_state_survives_both_ways",
        "parallel/test_sync_batch_norm_alone.py::test_trains_as_batchnorm",
    ),
    row(
        "fuse_relu without channels last applies ReLU, forward and backward; 2-D input trains.",
        "parallel/test_sync_batch_norm_alone.py::test_trains_as_batchnorm",
    ),
]

CHECKPOINTS = [
    row(
        "2N steps equal N, save, load, N, bit for bit, at every level.",
        "lightning/test_checkpoints.py::test_2n_steps_equal_n_save_load_n",
        "lightning/test_every_optimizer.py::test_2n_steps_equal_n_save_load_n",
        "amp/test_amp_checkpoints.py::test_resume_is_exact",
    ),
    row(
        "Loading an optimizer's state does not round fp32 moments to the parameter's half type.",
        "test_engine.py::TestOptimizers::test_loading_state_keeps_it_fp32",
        "optimizers/test_state_dicts.py::test_small_moments_of_half_parameters_survive",
        "lightning/test_checkpoints.py::test_moments_in_a_checkpoint_are_fp32",
    ),
    row(
        "Any level resumes from any level's checkpoint, and from Lightning's own.",
        "lightning/test_checkpoints.py::test_a_level_resumes_another",
        "lightning/test_checkpoints.py::test_any_level_resumes_any_other",
        "lightning/test_checkpoints.py::test_native_checkpoint_resumes_and_back",
        "lightning/test_checkpoints.py::test_native_16_mixed_checkpoint_resumes_with_its_scale",
    ),
    row(
        "Scale, growth and hysteresis are in the checkpoint, for each loss.",
        "lightning/test_checkpoints.py::test_scale_state_is_in_the_checkpoint",
        "amp/test_amp_checkpoints.py::test_state_dict_without_arguments",
    ),
    row(
        "States of torch's optimizers load into ours and back, in the middle of a run, with the same next step.",
        "optimizers/test_state_dicts.py::TestWithTorch::test_theirs_into_ours",
        "optimizers/test_state_dicts.py::TestWithTorch::test_ours_into_theirs",
    ),
    row(
        "Every optimizer's state goes there and back, before the first step and later.",
        "optimizers/test_state_dicts.py::TestThereAndBack::test_the_next_steps_are_the_same_bits",
        "optimizers/test_apex_states.py::TestApexsNovoGrad::test_is_taken_over",
    ),
    row(
        "Models pickle, save whole and start in other processes while they train.",
        "lightning/test_fit_lifecycle.py::test_copies_made_during_training_own_their_weights",
        "lightning/test_fit_lifecycle.py::test_plugin_pickles_and_copies",
        "lightning/test_ddp.py::test_ddp_spawn",
        "amp/test_amp_copies.py::TestCopies::test_compute_the_same_and_live_on_their_own",
        "amp/test_amp_ddp.py::test_processes_started_after_initialize",
    ),
]

OPTIMIZERS = [
    row(
        "A parameter group that is added later trains, at every level.",
        "lightning/test_callbacks.py::test_backbone_finetuning",
        "optimizers/test_loop.py::TestNewGroups::test_train_from_their_own_first_step",
        "amp/test_amp_models.py::test_a_group_added_later",
    ),
    row(
        "A parameter whose first gradient comes late has the bias correction of its own first step.",
        "optimizers/test_corners.py::TestMissingGradients::test_a_late_one_gets_the_corrections_of_its_own_first_step",
    ),
    row(
        "More than 2^31 elements in one tensor, on a GPU; far more than a chunk, on a CPU.",
        "test_cuda.py::test_more_elements_than_an_int_counts",
        "optimizers/test_large.py::test_400_million_elements",
    ),
    row(
        "Transposed, expanded and sliced parameters and gradients.",
        "optimizers/test_corners.py::TestLayouts::test_of_parameters_and_gradients",
        "optimizers/test_corners.py::TestLayouts::test_an_expanded_gradient",
        "optimizers/test_corners.py::TestLayouts::test_a_slice_leaves_its_neighbours_alone",
        "test_fused_step.py::test_layouts_that_differ",
    ),
    row(
        "Momentum starts for each parameter by itself.",
        "optimizers/test_corners.py::TestMissingGradients::test_change_from_step_to_step",
        "optimizers/test_remembered_lists.py::TestChangesBetweenSteps::test_the_state_of_one_parameter_is_dropped",
    ),
    row(
        "Parameters of every type are updated or refused, never passed over; tiny steps add up in masters.",
        "optimizers/test_corners.py::test_dtypes_may_be_mixed_in_a_group",
        "optimizers/test_validation.py::TestParameters::test_of_a_type_that_has_no_kernel",
        "optimizers/test_loop.py::test_bfloat16_weights_with_masters_accumulate_tiny_steps",
        "test_fused_step.py::test_masters_add_up_steps_too_small_for_the_parameter",
    ),
    row(
        "LAMB's max_grad_norm is each group's, counts from a loaded state, None is off, and gradients stay unchanged.",
        "optimizers/test_lamb_clipping.py::test_each_group_has_a_limit_of_its_own_for_the_norm_of_all",
        "optimizers/test_lamb_clipping.py::test_the_limit_of_a_loaded_state_counts",
        "optimizers/test_lamb_clipping.py::test_gradients_are_untouched",
    ),
    row(
        "Empty groups, groups without gradients, and steps without any gradient.",
        "optimizers/test_corners.py::TestMissingGradients::test_groups_without_any",
        "optimizers/test_corners.py::TestMissingGradients::test_none_at_all",
        "optimizers/test_corners.py::TestManyTensors::test_an_empty_one_anywhere",
    ),
    row(
        "Sparse gradients are refused with a sentence by fused optimizers, and scaled rightly for others.",
        "optimizers/test_corners.py::test_sparse_gradients_are_refused_before_anything_changes",
        "lightning/test_bad_input.py::test_sparse_gradients_are_refused_by_fused_optimizers",
        "test_scaler.py::TestSkippedSteps::test_through_sparse_gradients",
        "test_scaler.py::TestSkippedSteps::test_sparse_duplicates_that_overflow_together",
    ),
    row(
        "zero_grad with and without set_to_none; closures, also where the step is skipped.",
        "optimizers/test_loop.py::TestZeroGrad::test_as_asked",
        "optimizers/test_loop.py::test_a_closure",
        "fabric/test_fabric_loops.py::test_a_closure_is_called_once_before_the_step",
        "amp/test_amp_steps.py::TestClosures::test_equal_the_ordinary_loop",
    ),
    row(
        "LARC is an Optimizer, for schedulers, closures and state dicts; decay counts where a norm is 0, and comes "
        "back when the inner step raises.",
        "test_larc_use.py::TestIsAnOptimizer::test_by_type",
        "test_larc_use.py::TestIsAnOptimizer::test_schedulers",
        "test_larc_use.py::TestIsAnOptimizer::test_closures",
        "test_larc_use.py::TestIsAnOptimizer::test_state_dicts_are_the_wrapped_optimizers",
        "test_larc.py::TestZeroNorms::test_the_decay_is_kept_where_the_gradient_is_zero",
        "test_larc.py::TestWhatStaysAsItWas::test_also_when_something_raises",
        "lightning/test_every_optimizer.py::test_larc_is_what_the_trainer_sees",
    ),
    row(
        "Parameters on several devices, none of which is the current one.",
        "test_cuda.py::test_the_current_device_is_not_theirs",
    ),
]

CASES = [*LOSS_SCALE, *SYNC_BATCH_NORM, *CHECKPOINTS, *OPTIMIZERS]
