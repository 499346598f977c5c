"""What a LossScaler saves, whose dictionaries it loads, and the arguments it refuses."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # teaches ForkingPickler tensors
from torch import nn

from lightning_apex import LossScaler


def trained(scaler, pattern=(False, False, True, False)):
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for overflow in pattern:
        optimizer.zero_grad()
        scaler.scale(param.sum() * (torch.inf if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_a_process_that_a_scaler_is_sent_to_has_its_own():
    # as torch sends it to the processes of ddp_spawn: tensors would go by shared memory
    scaler = trained(LossScaler(init_scale=8.0))
    before = scaler.state_dict()
    twin = pickle.loads(bytes(ForkingPickler.dumps(scaler)))
    assert twin.state_dict() == before
    trained(twin, (True, True))
    assert scaler.state_dict() == before


def test_has_grad_scalers_keys_and_plain_numbers():
    ours, theirs = trained(LossScaler()).state_dict(), trained(torch.amp.GradScaler("cpu")).state_dict()
    assert {key: ours[key] for key in theirs} == theirs
    assert {type(value) for value in ours.values()} <= {int, float, bool}


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"ApexPrecision": state}])
def test_a_weights_only_load_reads_it(wrap):
    state = wrap(trained(LossScaler()).state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


def test_numpy_numbers_are_saved_as_plain_ones():
    np = pytest.importorskip("numpy")
    scaler = LossScaler(
        init_scale=np.float64(8),
        growth_factor=np.float64(2),
        backoff_factor=np.float32(0.5),
        max_loss_scale=np.float32(64),
    )
    assert {type(value) for value in scaler.state_dict().values()} <= {int, float, bool}


def test_a_round_trip_goes_on_with_the_same_scales():
    rule = {"init_scale": 2.0**12, "growth_interval": 3, "hysteresis": 2, "backoff_factor": 0.25}
    first = trained(LossScaler(**rule), [False, True, False, False, True])
    second = LossScaler()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    for pattern in ([True], [False], [False, False], [True, True]):
        assert trained(second, pattern).state_dict() == trained(first, pattern).state_dict()


def test_integers_given_as_numbers_do_not_round_what_is_loaded():
    scaler = LossScaler(init_scale=4, growth_factor=2, min_loss_scale=1, max_loss_scale=1024)
    state = LossScaler(init_scale=4.0, growth_factor=1.5, min_loss_scale=0.5).state_dict()
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state


class TestOthersDictionaries:
    def test_grad_scaler(self):
        theirs = trained(torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_factor=4.0, growth_interval=7))
        scaler = LossScaler(hysteresis=3)
        scaler.load_state_dict(theirs.state_dict())
        state = scaler.state_dict()
        assert {key: state[key] for key in theirs.state_dict()} == theirs.state_dict()
        assert state["_hysteresis_tracker"] == 3

    def test_grad_scaler_loads_ours(self):
        ours = trained(LossScaler(init_scale=2.0**9, growth_interval=7))
        theirs = torch.amp.GradScaler("cpu")
        theirs.load_state_dict(ours.state_dict())
        assert theirs.get_scale() == ours.get_scale() == 2.0**8
        assert trained(theirs, [False, True]).get_scale() == trained(ours, [False, True]).get_scale()

    @pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"loss_scaler0": state}])
    def test_apex(self, wrap):
        scaler = LossScaler(growth_interval=5)
        scaler.load_state_dict(wrap({"loss_scale": 512.0, "unskipped": 4}))
        assert scaler.get_scale() == 512.0 and scaler.state_dict()["_growth_tracker"] == 4
        trained(scaler, [False])
        assert scaler.get_scale() == 1024.0, "the fifth good step in a row"

    def test_a_tensor_as_the_scale(self):
        scaler = LossScaler()
        scaler.load_state_dict({"loss_scale": torch.tensor(256.0), "unskipped": 0})
        assert scaler.get_scale() == 256.0

    def test_a_scale_beyond_our_bounds(self):
        scaler = LossScaler(max_loss_scale=64.0, min_loss_scale=2.0)
        state = torch.amp.GradScaler("cpu", init_scale=2.0**40).state_dict()
        scaler.load_state_dict(state)
        assert scaler.get_scale() == 64.0
        scaler.load_state_dict(state | {"scale": 0.0})
        assert scaler.get_scale() == 2.0, "a GradScaler ends at 0 after too many overflows"

    @pytest.mark.parametrize("bad", [{"foo": 1}, {"unskipped": 3}, {"loss_scaler0": {}, "loss_scaler1": {}}])
    def test_an_unknown_dictionary_is_an_error_that_shows_its_keys(self, bad):
        with pytest.raises(ValueError, match=sorted(bad)[0]):
            LossScaler().load_state_dict(bad)

    @pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
    def test_a_bad_scale_changes_nothing(self, bad):
        scaler = LossScaler(init_scale=8.0)
        state = scaler.state_dict()
        with pytest.raises(ValueError, match=f"scale={bad}"):
            scaler.load_state_dict(state | {"scale": bad})
        assert scaler.state_dict() == state

    def test_a_bad_rule_changes_nothing(self):
        scaler = LossScaler(init_scale=8.0)
        state = scaler.state_dict()
        with pytest.raises(ValueError, match=r"growth_factor=0\.5"):
            scaler.load_state_dict(state | {"scale": 4.0, "growth_factor": 0.5})
        assert scaler.state_dict() == state

    def test_an_empty_dictionary_is_that_of_a_disabled_scaler(self):
        scaler = LossScaler(init_scale=8.0)
        scaler.load_state_dict({})
        scaler.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
        assert scaler.get_scale() == 8.0

    def test_a_fixed_scale_neither_gives_nor_takes(self):
        fixed, dynamic = LossScaler(64.0), LossScaler(init_scale=8.0)
        state = dynamic.state_dict()
        dynamic.load_state_dict(fixed.state_dict())
        assert dynamic.state_dict() == state
        fixed.load_state_dict(state)
        assert fixed.get_scale() == 64.0
        disabled = LossScaler(1.0)
        disabled.load_state_dict(state)
        assert disabled.get_scale() == 1.0


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            *[("growth_factor", bad) for bad in (1.0, 0.5, -2.0, float("inf"), float("nan"), "2", None)],
            *[("backoff_factor", bad) for bad in (0.0, 1.0, 2.0, -0.5, float("nan"), "x")],
            *[("growth_interval", bad) for bad in (0, -1, 2.5, True, None, "9", 2**31)],
            *[("hysteresis", bad) for bad in (0, -1, 1.5, False, None)],
            *[("min_loss_scale", bad) for bad in (0, 0.0, -1.0, float("inf"), float("nan"), None, 1e-50)],
            *[("max_loss_scale", bad) for bad in (0.0, float("inf"), float("nan"), 2.0**-11, "big", 1e39)],
            *[("init_scale", bad) for bad in (0.0, -1.0, float("inf"), float("nan"), None, "x", 1e39, 1e-50)],
            *[("max_consecutive_skips", bad) for bad in (0, -1, 2.5, "x")],
            *[
                ("loss_scale", bad)
                for bad in (0, 0.0, -1.0, float("inf"), float("nan"), None, "static", True, 1e-50, 1e39)
            ],
        ],
    )
    def test_a_bad_value_is_named(self, name, bad):
        with pytest.raises(ValueError) as caught:
            LossScaler(**{name: bad})
        assert f"{name}={bad!r}" in str(caught.value)

    def test_good_values_at_the_edge(self):
        LossScaler(
            init_scale=1,
            growth_factor=1.0001,
            backoff_factor=0.9999,
            growth_interval=1,
            hysteresis=1000,
            min_loss_scale=2.0**-100,
            max_loss_scale=2.0**100,
            max_consecutive_skips=None,
        )
        scaler = LossScaler(min_loss_scale=4.0, max_loss_scale=4.0)
        assert scaler.get_scale() == 4.0
