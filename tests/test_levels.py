"""The table of opt levels, its overrides, and the sentences of its errors."""

import dataclasses

import pytest
import torch

from lightning_apex.levels import LEVELS, OptLevel, OptLevelError, resolve

FP16, BF16 = torch.float16, torch.bfloat16
FIELDS = (
    "half_dtype",
    "casts_weights",
    "autocasts",
    "casts_inputs",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
# What each level promises, written down once more by hand.
TABLE = {
    "O0": (None, False, False, False, True, False, 1.0),
    "O1": (FP16, False, True, False, True, False, "dynamic"),
    "O2": (FP16, True, True, False, True, True, "dynamic"),
    "O3": (FP16, True, False, True, False, False, 1.0),
    "O4": (BF16, False, True, False, True, False, 1.0),
    "O5": (BF16, True, True, False, True, True, 1.0),
}


def row(level: OptLevel) -> tuple:
    return tuple(getattr(level, field) for field in FIELDS)


@pytest.mark.parametrize("name", TABLE)
def test_each_level_is_the_row_that_the_documentation_shows(name):
    level = resolve(name)
    assert level.name == name
    assert row(level) == TABLE[name]
    assert level.half_dtype_is_default


def test_there_are_six_levels_and_they_cannot_be_edited():
    assert list(LEVELS) == list(TABLE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        LEVELS["O1"].loss_scale = 2.0


@pytest.mark.parametrize("name", TABLE)
def test_an_override_does_not_change_the_table(name):
    resolve(name, loss_scale=7.0, master_weights=False, keep_batchnorm_fp32=True)
    assert row(resolve(name)) == TABLE[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("O0", "32-true"), ("O1", "16-mixed"), ("O2", "16-mixed"),
        ("O3", "16-true"), ("O4", "bf16-mixed"), ("O5", "bf16-mixed"),
    ],
)  # fmt: skip
def test_the_nearest_lightning_precision(name, expected):
    assert resolve(name).lightning_precision == expected


def test_the_lightning_precision_follows_the_half_type():
    assert resolve("O1", half_dtype="bfloat16").lightning_precision == "bf16-mixed"
    assert resolve("O3", half_dtype="bfloat16").lightning_precision == "bf16-true"
    assert resolve("O1").on("cpu").lightning_precision == "bf16-mixed"


class TestOnADevice:
    @pytest.mark.parametrize("name", ["O1", "O2", "O3"])
    def test_the_default_fp16_becomes_bf16_on_a_cpu_and_nothing_else_changes(self, name):
        level = resolve(name)
        on_cpu = level.on("cpu")
        assert on_cpu.half_dtype is BF16
        assert dataclasses.replace(on_cpu, half_dtype=FP16) == level

    @pytest.mark.parametrize("name", ["O0", "O4", "O5"])
    def test_levels_without_fp16_stay(self, name):
        assert resolve(name).on("cpu") == resolve(name)

    @pytest.mark.parametrize("name", TABLE)
    def test_nothing_changes_on_cuda(self, name):
        assert resolve(name).on("cuda") == resolve(name)

    @pytest.mark.parametrize("name", ["O1", "O2", "O3"])
    @pytest.mark.parametrize("dtype", ["float16", FP16])
    def test_fp16_that_was_asked_for_stays_on_a_cpu(self, name, dtype):
        assert resolve(name, half_dtype=dtype).on("cpu").half_dtype is FP16

    def test_an_override_of_something_else_does_not_count_as_asking_for_fp16(self):
        assert resolve("O2", loss_scale=128.0).on("cpu").half_dtype is BF16


class TestOverrides:
    @pytest.mark.parametrize("name", ["O1", "O2", "O3", "O4", "O5"])
    @pytest.mark.parametrize("spelling", ["bfloat16", "torch.bfloat16", BF16])
    def test_bfloat16_in_every_spelling(self, name, spelling):
        level = resolve(name, half_dtype=spelling)
        assert level.half_dtype is BF16
        assert not level.half_dtype_is_default
        assert row(level)[1:] == TABLE[name][1:]

    @pytest.mark.parametrize("name", ["O2", "O3", "O5"])
    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize("masters", [True, False])
    def test_casting_levels_take_both_values_of_their_flags(self, name, keep, masters):
        level = resolve(name, keep_batchnorm_fp32=keep, master_weights=masters)
        assert (level.keep_batchnorm_fp32, level.master_weights) == (keep, masters)

    @pytest.mark.parametrize("name", ["O0", "O1", "O4"])
    def test_flags_that_agree_with_an_fp32_level_are_no_contradiction(self, name):
        assert resolve(name, keep_batchnorm_fp32=True, master_weights=False) == resolve(name)

    @pytest.mark.parametrize("name", TABLE)
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("dynamic", "dynamic"),
            (1, 1.0),
            (128.0, 128.0),
            ("128.0", 128.0),
            (2.0**-10, 2.0**-10),
            (2.0**100, 2.0**100),
        ],
    )
    def test_loss_scale(self, name, given, expected):
        level = resolve(name, loss_scale=given)
        assert level.loss_scale == expected
        assert type(level.loss_scale) is type(expected)
        assert row(level)[:-1] == TABLE[name][:-1]


class TestErrors:
    """Each names the argument and its value, and says what to use instead."""

    @staticmethod
    def message(*args, **kwargs) -> str:
        with pytest.raises(OptLevelError) as caught:
            resolve(*args, **kwargs)
        return str(caught.value)

    def test_is_a_value_error(self):
        assert issubclass(OptLevelError, ValueError)

    @pytest.mark.parametrize("bad", ["O6", "o1", "", "O", "01", "2", 1, None, True, ("O1",), "O1 ", "16-mixed"])
    def test_an_unknown_level_lists_the_six(self, bad):
        message = self.message(bad)
        assert f"opt_level={bad!r}" in message
        assert all(name in message for name in TABLE)

    def test_a_zero_for_the_letter_is_pointed_out(self):
        assert "not a zero" in self.message("01")
        assert "not a zero" not in self.message("O7")

    @pytest.mark.parametrize("bad", ["float32", "half", "fp16", "", torch.float32, torch.int16, 16, ["float16"]])
    @pytest.mark.parametrize("name", ["O0", "O2", "O5"])
    def test_no_half_type(self, name, bad):
        message = self.message(name, half_dtype=bad)
        assert f"half_dtype={bad!r}" in message
        assert "float16" in message and "bfloat16" in message

    @pytest.mark.parametrize("good", ["float16", BF16])
    def test_a_half_type_contradicts_o0(self, good):
        message = self.message("O0", half_dtype=good)
        assert f"half_dtype={good!r}" in message and "'O0'" in message and "'O1'" in message

    @pytest.mark.parametrize(("name", "instead"), [("O4", "'O1'"), ("O5", "'O2'")])
    def test_fp16_contradicts_a_bfloat16_level(self, name, instead):
        message = self.message(name, half_dtype="float16")
        assert f"opt_level={name!r}" in message and instead in message

    @pytest.mark.parametrize("name", ["O0", "O1", "O4"])
    def test_masters_contradict_fp32_weights(self, name):
        message = self.message(name, master_weights=True)
        assert "master_weights=True" in message and f"{name!r}" in message and "'O2'" in message

    @pytest.mark.parametrize("name", ["O0", "O1", "O4"])
    def test_half_batchnorm_contradicts_fp32_weights(self, name):
        message = self.message(name, keep_batchnorm_fp32=False)
        assert "keep_batchnorm_fp32=False" in message and f"{name!r}" in message and "'O3'" in message

    @pytest.mark.parametrize("flag", ["keep_batchnorm_fp32", "master_weights"])
    @pytest.mark.parametrize("bad", ["True", 1, 0, "yes"])
    def test_a_flag_that_is_no_bool(self, flag, bad):
        assert f"{flag}={bad!r}" in self.message("O2", **{flag: bad})

    @pytest.mark.parametrize(
        "bad", [0, -1.0, float("inf"), float("nan"), "static", "", True, [1.0], 1e-50, 1e39, torch.tensor([1.0, 2.0])]
    )
    @pytest.mark.parametrize("name", ["O0", "O2"])
    def test_a_loss_scale_that_is_none(self, name, bad):
        message = self.message(name, loss_scale=bad)
        assert f"loss_scale={bad!r}" in message and "dynamic" in message
