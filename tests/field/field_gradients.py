"""What people have reported to Lightning of losses, gradients and steps, as the behaviour that is right here."""

from field_row import row

SCHEDULERS = [
    row(
        "An overflow on the first step of a run with a step scheduler warns of no wrong order.",
        "lightning/test_schedulers.py::test_three_overflows_then_four_good_batches",
        issue=5558,
    ),
    row(
        "On a skipped step the learning rate does not advance.",
        "lightning/test_schedulers.py::test_three_overflows_then_four_good_batches",
        "lightning/test_schedulers.py::test_kinds_of_schedulers_equal_a_run_without_the_bad_batches",
        "lightning/test_schedulers.py::test_two_schedulers_of_one_optimizer_both_stand_still",
        issue=(18828, 16228),
    ),
    row(
        "The same with a fixed scale.",
        "lightning/test_field_training.py::test_a_fixed_scale_with_a_scheduler_warns_of_nothing",
        issue=21339,
    ),
]

STEPS = [
    row(
        "Manual optimization: after clip_gradients the norm is the limit, as in an fp32 run.",
        "lightning/test_manual.py::test_manual_clip_is_on_unscaled_gradients",
        issue=18089,
    ),
    row(
        "What clipping does is independent of the loss scale.",
        "lightning/test_clipping.py::test_clip_does_not_depend_on_the_loss_scale",
        issue=9694,
    ),
    row(
        "A fused optimizer unscales once, as one that is not fused.",
        "lightning/test_clipping.py::test_fused_clip_equals_unfused_clip",
        "test_step.py::test_every_way_equals_torch",
        issue=15501,
    ),
    row(
        "A fused optimizer with bf16, no scaler and clipping trains.",
        "lightning/test_field_training.py::test_torchs_fused_optimizers_train_with_clipping",
        "lightning/test_field_training.py::test_our_optimizers_train_under_lightnings_own_precision_with_clipping",
        issue=21435,
    ),
    row(
        "A first batch that returns None is no step, and the next one is as ever.",
        "lightning/test_fit_lifecycle.py::test_training_step_returning_none",
        issue=7792,
    ),
    row(
        "Two optimizers of which each batch steps one.",
        "lightning/test_manual.py::test_only_one_of_two_optimizers_stepped",
        issue=(4524, 20116),
    ),
    row(
        "None in the middle of an epoch does not disturb the next unscaling.",
        "lightning/test_corners_of_use.py::test_a_dropped_batch_after_unscale",
        "lightning/test_fit_lifecycle.py::test_none_in_an_accumulation_window",
        issue=9352,
    ),
    row(
        "Accumulated gradients are unscaled once a step.",
        "lightning/test_levels_train.py::test_accumulation_equals_a_larger_batch",
        "test_scaler_use.py::TestUnscale::test_twice_divides_once",
        issue=4427,
    ),
    row(
        "Manual optimization moves the scale after each step.",
        "lightning/test_field_training.py::test_the_scale_moves_after_each_manual_step",
        issue=4148,
    ),
    row(
        "A plain loss.backward() in manual optimization is an error that names manual_backward.",
        "lightning/test_manual.py::test_raw_backward_is_refused_where_it_would_be_wrong",
        "lightning/test_manual.py::test_raw_backward_with_clip_gradients_is_refused",
        issue=19695,
    ),
    row(
        "A backward pass that belongs to no optimizer works.",
        "lightning/test_manual.py::test_manual_equals_automatic",
        "lightning/test_manual.py::test_one_backward_for_two_optimizers",
        issue=6112,
    ),
    row(
        "A module's own optimizer_step that calls step(closure) works with masters.",
        "lightning/test_clipping.py::test_user_optimizer_step_calling_step_with_the_closure",
        "lightning/test_clipping.py::test_user_optimizer_step_with_warm_up",
        issue=2343,
    ),
    row(
        "on_before_optimizer_step sees unscaled gradients, on_after_backward scaled ones.",
        "lightning/test_clipping.py::test_user_hook_sees_and_edits_unscaled_fp32_gradients",
        "lightning/test_field_training.py::test_gradients_are_scaled_after_backward_and_unscaled_before_the_step",
        issue=4151,
    ),
    row(
        "A forward pass without gradients before one with them, in one step: all parameters get gradients, and casts "
        "do not pile up.",
        "lightning/test_models.py::test_no_grad_forward_before_the_real_one",
        "test_engine.py::TestWayBack::test_many_passes_and_fits_keep_nothing_alive",
        issue=20251,
        pull=(20921, 21616),
    ),
    row(
        "At O1 a weight is cast once a forward pass, at O2 never.",
        "lightning/test_field_training.py::test_a_weight_is_cast_once_in_a_forward_pass_or_never",
        issue=19950,
    ),
    row(
        "A first scale of 65536 with a loss above 1 does not overflow: losses are scaled in fp32.",
        "test_scaler_use.py::TestLosses::test_half_losses_are_scaled_in_fp32",
        "lightning/test_overflow.py::test_real_fp16_overflow_is_found_and_recovered_from",
        issue=9799,
    ),
    row(
        "Half weights with Adam's eps of 1e-8: a warning where torch's Adam keeps its state in half, finite weights.",
        "lightning/test_overrides.py::test_o3_warns_of_an_eps_that_vanishes_in_fp16",
        "test_engine.py::TestOptimizers::test_o3_with_fused_adam_stays_finite",
        issue=20619,
    ),
    row(
        "The losses are those of a plain loop with autocast and a GradScaler.",
        "lightning/test_levels_train.py::test_o1_equals_a_torch_autocast_loop",
        "amp/test_amp_loops.py::test_O1_is_autocast_with_GradScaler",
        issue=5159,
    ),
]

GRADIENTS = [*SCHEDULERS, *STEPS]
