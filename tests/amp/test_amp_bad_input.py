"""Each mistake gets one sentence that says what to do, and changes nothing."""

import pytest
import torch
from amp_support import LEVELS, OPTIMIZERS, fp32, loss_of, net, same, start, state_of, step
from torch import nn

from lightning_apex import OptLevelError, amp
from lightning_apex.amp import context


def untouched(model, before):
    hooks = [m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in model.modules()]
    return same(fp32(model), before) and not any(hooks) and {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt_level": "01"}, OptLevelError, "the letter O, not a zero"),
        ({"opt_level": "O6"}, OptLevelError, "O0, O1, O2, O3, O4, O5"),
        ({"opt_level": 1}, OptLevelError, "opt_level=1"),
        ({"enabled": "O2"}, ValueError, "write opt_level='O2'"),
        ({"enabled": "yes"}, ValueError, "enabled='yes'"),
        ({"opt_level": "O1", "master_weights": True}, OptLevelError, "use 'O2' or 'O5'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "False"}, OptLevelError, "keep_batchnorm_fp32=False"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "false"}, OptLevelError, "keep_batchnorm_fp32='false'"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, OptLevelError, "cast_model_type"),
        ({"opt_level": "O2", "cast_model_type": torch.float32}, OptLevelError, "use 'O0'"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, OptLevelError, "cast_model_type"),
        ({"opt_level": "O2", "patch_torch_functions": True}, OptLevelError, "patch_torch_functions"),
        ({"opt_level": "O1", "patch_torch_functions": False}, OptLevelError, "patch_torch_functions"),
        ({"opt_level": "O1", "cast_model_outputs": "int"}, OptLevelError, "cast_model_outputs='int'"),
        ({"opt_level": "O1", "loss_scale": "fast"}, OptLevelError, "loss_scale='fast'"),
        ({"opt_level": "O1", "loss_scale": 0}, OptLevelError, "loss_scale=0"),
        ({"opt_level": "O1", "min_loss_scale": 0}, ValueError, "min_loss_scale=0"),
        ({"opt_level": "O1", "max_loss_scale": 2.0**-20}, ValueError, "max_loss_scale"),
        ({"opt_level": "O1", "num_losses": 0}, ValueError, "num_losses=0"),
        ({"opt_level": "O1", "num_losses": 2.0}, ValueError, r"num_losses=2\.0"),
        ({"opt_level": "O2", "keep_fp32": ["nothing.*"]}, ValueError, "keep_fp32='nothing.*'"),
        ({"opt_level": "O2", "half_dtype": "float8"}, OptLevelError, "half_dtype='float8'"),
    ],
)
def test_initialize_refuses(arguments, error, message):
    model = net()
    before = fp32(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=message):
        amp.initialize(model, optimizer, **{"verbosity": 0} | arguments)
    assert untouched(model, before) and not optimizer._optimizer_step_pre_hooks
    assert not context._alive


class TestObjectsThatDoNotFit:
    @pytest.mark.parametrize("models", [None, [net(), None], "model", {"a": 1}])
    def test_models(self, models):
        with pytest.raises(TypeError, match="models holds a"):
            amp.initialize(models, verbosity=0)

    @pytest.mark.parametrize("optimizers", ["sgd", [None], torch.optim.SGD])
    def test_optimizers(self, optimizers):
        model = net()
        with pytest.raises(TypeError, match="optimizers holds a"):
            amp.initialize(model, optimizers, verbosity=0)
        assert untouched(model, fp32(net()))

    def test_twice(self):
        model = net()
        with pytest.raises(ValueError, match="models holds one object twice"):
            amp.initialize([model, model], verbosity=0)

    def test_wrapped_models(self):
        with pytest.raises(ValueError, match="wrapped in DataParallel already"):
            amp.initialize(nn.DataParallel(net()), verbosity=0)

    @pytest.mark.parametrize("level", LEVELS)
    def test_half_models(self, level):
        good, bad = net(), net().to(torch.bfloat16)
        optimizer = torch.optim.SGD(good.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"bfloat16 already.*remove \.half\(\)"):
            amp.initialize([good, bad], optimizer, opt_level=level, verbosity=0)
        assert untouched(good, fp32(net()))

    def test_lbfgs(self):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
            amp.initialize(model, optimizer, verbosity=0)
        assert untouched(model, fp32(net()))
        model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            return loss

        before = loss_of(model).item()
        optimizer.step(closure)
        assert loss_of(model).item() < before


class TestScaleLoss:
    def test_before_initialize(self):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = loss_of(model)
        message = r"SGD that amp\.initialize\(\) does not know"
        with pytest.raises(RuntimeError, match=message), amp.scale_loss(loss, optimizer):
            pass

    def test_with_another_optimizer(self):
        model, _ = start("O1")
        with (
            pytest.raises(RuntimeError, match="Adam that"),
            amp.scale_loss(loss_of(model), torch.optim.Adam(model.parameters())),
        ):
            pass

    def test_with_no_optimizer_at_all(self):
        model, _ = start("O1")
        with pytest.raises(ValueError, match="no optimizer"), amp.scale_loss(loss_of(model), []):
            pass
        for nothing in (None, model, "optimizer"):
            with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(loss_of(model), nothing):
                pass

    def test_with_optimizers_of_two_contexts(self):
        first, second = start("O1"), start("O1", model=net(3))
        both = [first[1], second[1]]
        with pytest.raises(RuntimeError, match="initialise together"), amp.scale_loss(loss_of(first[0]), both):
            pass

    @pytest.mark.parametrize("loss_id", [-1, 2, "0", None, True, 1.0])
    def test_loss_id(self, loss_id):
        model, made = start("O1", num_losses=2)
        step(model, made)
        before = fp32(model), state_of(made), amp.state_dict(made)
        loss, message = loss_of(net()), "num_losses=2, so it is 0 to 1"
        with pytest.raises(ValueError, match=message), amp.scale_loss(loss, made, loss_id=loss_id):
            pass
        assert same((fp32(model), state_of(made), amp.state_dict(made)), before)

    @pytest.mark.parametrize("loss", [1.0, None, {"loss": torch.ones(())}])
    def test_loss(self, loss):
        _, made = start("O1")
        with pytest.raises(TypeError, match=f"got a {type(loss).__name__} as loss"), amp.scale_loss(loss, made):
            pass

    def test_inside_itself(self):
        model, made = start("O1")
        loss = loss_of(model)
        with amp.scale_loss(loss, made) as scaled_loss:
            with pytest.raises(RuntimeError, match="entered twice"), amp.scale_loss(loss, made):
                pass
            scaled_loss.backward()
        made.step()
        step(model, made)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_sparse_gradient(level, optimizer):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    made = OPTIMIZERS[optimizer](model.parameters())
    if optimizer == "sgd":
        made.param_groups[0]["momentum"] = 0.0  # torch's SGD takes them without
    model, made = amp.initialize(model, made, opt_level=level, half_dtype=None, verbosity=0)

    def backward():
        made.zero_grad()
        with amp.scale_loss(model(torch.tensor([1, 1, 3])).sum(), made) as scaled_loss:
            scaled_loss.backward()

    backward()
    before, state, scales = fp32(model), state_of(made)["state"], amp.state_dict(made)
    if optimizer == "sgd":
        made.step()
        after = fp32(model)["0.weight"]
        assert torch.equal(after[[0, 2, 4]], before["0.weight"][[0, 2, 4]])
        assert not torch.equal(after[1], before["0.weight"][1])
        return
    with pytest.raises(RuntimeError, match="sparse gradients"):
        made.step()
    assert same(fp32(model), before) and same(state_of(made)["state"], state)
    if "fused" in optimizer:
        assert amp.state_dict(made) == scales
    assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    model[0].sparse = False
    backward()
    made.step()
    assert not same(fp32(model), before)


class TestChoosing:
    def test_there_is_nothing(self):
        assert amp.state_dict() == {}
        with pytest.raises(RuntimeError, match=r"before amp\.initialize"):
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
        for of in (net(), torch.optim.SGD(net().parameters())):
            with pytest.raises(RuntimeError, match="does not know"):
                amp.state_dict(of)

    def test_there_are_two(self):
        first, second = start("O0"), start("O2", model=net(3), init_scale=4.0)
        for function in (amp.state_dict, lambda: amp.load_state_dict({}), lambda: amp.autocast().__enter__()):
            with pytest.raises(RuntimeError, match="choose between 2 calls"):
                function()
        assert amp.state_dict(first[0])["loss_scaler0"]["loss_scale"] == 1.0
        assert amp.state_dict(second[1])["loss_scaler0"]["loss_scale"] == 4.0
        del first
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0
