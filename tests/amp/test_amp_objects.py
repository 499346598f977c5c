"""What initialize() returns, second calls, other contexts, and amp switched off."""

import pytest
import torch
from amp_support import BF16, LEVELS, OPTIMIZERS, batch, fp32, loss_of, net, same, scale_of, start, state_of, step
from torch import nn

from lightning_apex import amp


class TestWhatComesBack:
    def test_single_objects_and_lists(self):
        def make():
            model = net()
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        for models_as_list in (False, True):
            for optimizers_as_list in (False, True):
                model, made = make()
                models, optimizers = amp.initialize(
                    [model] if models_as_list else model, [made] if optimizers_as_list else made, verbosity=0
                )
                assert (models[0] if models_as_list else models) is model
                assert (optimizers[0] if optimizers_as_list else optimizers) is made
        model, _ = make()
        assert amp.initialize(model, verbosity=0) is model
        assert amp.initialize([model], verbosity=0)[0] is model

    @pytest.mark.parametrize("level", LEVELS)
    def test_inference_without_an_optimizer(self, level):
        model = net().eval()
        expected = model(batch()[0])
        model = amp.initialize(model, opt_level=level, verbosity=0)
        with torch.no_grad():
            found = model(batch()[0])
        assert found.dtype is torch.float32
        assert (found - expected).abs().max() < (1e-7 if level == "O0" else 3e-2)
        assert same(fp32(model), fp32(net())) or level == "O3"
        with amp.autocast():
            model(batch()[0])

    @pytest.mark.parametrize(("dtype", "given"), [(torch.float16, "float16"), (BF16, BF16), (torch.float32, None)])
    @pytest.mark.parametrize("level", LEVELS)
    def test_cast_model_outputs(self, level, dtype, given):
        model, _ = start(level, cast_model_outputs=given)
        assert model(batch()[0]).dtype is dtype

    def test_arguments_as_strings(self):
        model, made = start("O2", keep_batchnorm_fp32="False", loss_scale="64", cast_model_type=torch.float16)
        assert {p.dtype for p in model.parameters()} == {torch.float16} and scale_of(made) == 64.0
        model, _ = start("O3", keep_batchnorm_fp32="True", cast_model_type="torch.bfloat16")
        assert model[1].weight.dtype is torch.float32 and model[0].weight.dtype is BF16
        start("O1", patch_torch_functions=True, master_weights=False, cast_model_type=None)
        start("O0", patch_torch_functions=False, cast_model_type=torch.float32, keep_batchnorm_fp32="True")

    def test_keep_fp32(self):
        models = [net(), net(1)]
        amp.initialize(models, opt_level="O2", keep_fp32="3", verbosity=0)
        assert all(m[3].weight.dtype is torch.float32 and m[0].weight.dtype is BF16 for m in models)


@pytest.mark.parametrize("enabled", [False, 0])
def test_disabled_is_the_plain_loop(enabled):
    plain, model = net(), net()
    by_hand = OPTIMIZERS["adamw"](plain.parameters())
    made = OPTIMIZERS["adamw"](model.parameters())
    before = [dict(vars(m)) for m in (model, *model.modules())], dict(vars(made))
    model, made = amp.initialize(model, made, enabled=enabled, opt_level="O2", num_losses=3)
    assert before == ([dict(vars(m)) for m in (model, *model.modules())], dict(vars(made)))
    for index in range(3):
        by_hand.zero_grad()
        loss_of(plain, index).backward()
        by_hand.step()
        made.zero_grad()
        with amp.autocast():
            loss = loss_of(model, index)
        with amp.scale_loss(loss, made, loss_id=2) as scaled_loss:
            assert scaled_loss is loss
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(made), 1e9)
        made.step()
    assert same(fp32(model), fp32(plain)) and same(state_of(made), state_of(by_hand))
    assert amp.state_dict() == {} == amp.state_dict(made)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})


class TestAgain:
    @pytest.mark.parametrize("second", LEVELS)
    @pytest.mark.parametrize("first", LEVELS)
    def test_the_second_call_counts(self, first, second):
        runs = []
        for levels in ([first, second], [second]):
            model = net()
            made = OPTIMIZERS["fused_adam"](model.parameters())
            for level in levels:
                if level == "O3" and len(levels) == 2 and levels[0] == "O3":
                    pytest.skip("without masters a cast loses bits")
                amp.initialize(model, made, opt_level=level, verbosity=0)
            for index in range(2):
                step(model, made, index)
            runs.append(fp32(model))
        if first != "O3":
            assert same(*runs)
        assert len(made._optimizer_step_pre_hooks) == 1 and len(model._forward_pre_hooks) == 1

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_in_the_middle_of_training(self, optimizer):
        model, made = start("O2", optimizer)
        step(model, made)
        weights = fp32(model)
        amp.initialize(model, made, opt_level="O0", verbosity=0)
        assert same(fp32(model), weights)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        step(model, made, 1)
        amp.initialize(model, made, opt_level="O5", verbosity=0)
        step(model, made, 2)
        amp.initialize(model, made, enabled=False)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not made._optimizer_step_pre_hooks and not model._forward_hooks
        assert {value.dtype for state in made.state.values() for value in state.values()} == {torch.float32}

    def test_with_gradients_under_way(self):
        for optimizer in ("sgd", "fused_adam"):
            model, made = start("O2", optimizer)
            with amp.scale_loss(loss_of(model), made) as scaled_loss:
                scaled_loss.backward()
            found = [m.grad.clone() for m in amp.master_params(made)]
            amp.initialize(model, made, opt_level="O0", verbosity=0)
            for p, grad in zip(model.parameters(), found, strict=True):
                assert p.grad.dtype is torch.float32
                assert (p.grad - grad).abs().max() <= 2**-7 * grad.abs().max()
            made.step()

    def test_a_refused_second_call_changes_nothing(self):
        model, made = start("O2")
        step(model, made)
        before = fp32(model), state_of(made), scale_of(made)
        with pytest.raises(ValueError, match="keep_fp32"):
            amp.initialize(model, made, opt_level="O5", keep_fp32=["nothing"], verbosity=0)
        assert same((fp32(model), state_of(made), scale_of(made)), before)
        step(model, made)

    def test_models_with_common_weights(self):
        first, second = net(), net(3)
        second[3].weight = first[3].weight
        made = torch.optim.SGD([*first.parameters(), *second[0].parameters()], lr=0.1)
        weights = fp32(first), fp32(second)
        amp.initialize([first, second], made, opt_level="O2", verbosity=0)
        assert second[3].weight is first[3].weight and first[3].weight.dtype is BF16
        assert same((fp32(first), fp32(second)), weights)
        with amp.scale_loss(loss_of(first) + loss_of(second), made) as scaled_loss:
            scaled_loss.backward()
        made.step()
        assert same(fp32(first)["3.weight"], fp32(second)["3.weight"])
        assert not same(fp32(first)["3.weight"], weights[0]["3.weight"])
        amp.initialize([first, second], made, opt_level="O0", verbosity=0)
        assert second[3].weight.dtype is torch.float32


class TestTwoContexts:
    def test_train_side_by_side_as_alone(self):
        def train(pairs):
            for index in range(4):
                for number, (model, made) in enumerate(pairs):
                    step(model, made, index, float("inf") if index == 1 and number == 0 else 1.0)
            return [(fp32(m), state_of(o)) for m, o in pairs]

        def first():
            return start("O2", "fused_adam", net(1))

        def second():
            return start("O1", "adamw", net(3), half_dtype="float16", init_scale=2.0**10)

        pair = [first(), second()]
        together = train(pair)
        assert (scale_of(pair[0][1]), scale_of(pair[1][1])) == (2.0**7, 2.0**10)
        (one,) = train([first()])
        assert same(together[0], one)
        model, made = second()
        for index in range(4):
            step(model, made, index)
        assert same(together[1], (fp32(model), state_of(made)))

    def test_other_models_are_left_alone(self):
        start("O1"), start("O5", model=net(3))
        other = net(4)
        assert other(batch()[0]).dtype is torch.float32
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.float32
        assert torch.nn.functional.linear.__module__ == "torch._C._nn" or callable(nn.functional.linear)

    def test_autocast_needs_no_choice_where_all_agree(self):
        first, second = start("O1"), start("O1", model=net(3))
        with amp.autocast():
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is BF16
        assert first and second
