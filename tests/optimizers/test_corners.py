"""Parameters and gradients of every kind a model can have; the witness is torch's unfused optimizer."""

import pytest
import torch
from cases import BF16, F16, F32, F64, LAYOUTS, same_bits
from optimizer_support import (
    KINDS,
    PAIRS,
    close,
    compare,
    copy_of,
    fill_grads,
    make_params,
    moments_of,
    ours,
    run,
    takes,
    theirs,
)
from reference_optimizer import TABLE
from torch import nn

pairs = pytest.mark.parametrize("pair", PAIRS)


@pairs
class TestMissingGradients:
    def test_are_passed_over(self, pair):
        params = make_params()
        a, b = ours(pair, params), theirs(pair, copy_of(params))
        run(a, b, skip=lambda i: i in (1, 4))
        assert params[1] not in a.state and params[4] not in a.state

    def test_change_from_step_to_step(self, pair):
        params = make_params()
        a, b = ours(pair, params), theirs(pair, copy_of(params))
        for step in range(8):
            run(a, b, [step], skip=lambda i, step=step: (i + step) % 3 == 0)

    def test_a_late_one_gets_the_corrections_of_its_own_first_step(self, pair):
        params = make_params()
        params[4].requires_grad_(False)
        a, b = ours(pair, params), theirs(pair, copy_of(params))
        run(a, b, range(50), skip=lambda i: i == 4)
        params[4].requires_grad_(True)
        run(a, b, range(50, 55))
        assert a.state[params[4]]["step"] == 5 and a.state[params[3]]["step"] == 55

    def test_groups_without_any(self, pair):
        params = make_params()
        groups = [{"params": []}, {"params": params[:2]}, {"params": []}, {"params": params[2:]}]
        copies = copy_of(params)
        twins = [{"params": []}, {"params": copies[:2]}, {"params": []}, {"params": copies[2:]}]
        run(ours(pair, groups), theirs(pair, twins), skip=lambda i: i < 2)

    def test_none_at_all(self, pair):
        params = make_params()
        before = copy_of(params)
        optimizer = ours(pair, params)
        assert optimizer.step() is None
        assert all(map(same_bits, params, before)) and not optimizer.state


@pairs
@pytest.mark.parametrize("dtype", [F32, F64])
class TestLayouts:
    @pytest.mark.parametrize("grad_layout", LAYOUTS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_of_parameters_and_gradients(self, pair, dtype, layout, grad_layout):
        plain = make_params(dtype, ((2, 3, 4, 5), (3, 5), (), (0,), (7, 0, 3), (33,)))
        params = [nn.Parameter(LAYOUTS[layout](p.detach().clone())) for p in plain]
        pointers, strides = [p.data_ptr() for p in params], [p.stride() for p in params]
        a, b = ours(pair, params), theirs(pair, plain)
        for step in range(3):
            fill_grads(step, params, plain)
            for p in params:
                p.grad = LAYOUTS[grad_layout](p.grad)
            grads = [p.grad.clone() for p in params]
            a.step()
            b.step()
            compare(a, b)
            assert all(same_bits(p.grad, g) for p, g in zip(params, grads, strict=True)), "a gradient was written"
        assert [p.data_ptr() for p in params] == pointers and [p.stride() for p in params] == strides

    def test_an_expanded_gradient(self, pair, dtype):
        params = make_params(dtype, ((4, 5),))
        copies = copy_of(params)
        a, b = ours(pair, params), theirs(pair, copies)
        for p in (params[0], copies[0]):
            p.grad = torch.full((1, 5), 0.5, dtype=dtype).expand(4, 5)
        a.step()
        b.step()
        compare(a, b)

    def test_a_slice_leaves_its_neighbours_alone(self, pair, dtype):
        whole = torch.full((6, 6), 7.0, dtype=dtype)
        param = nn.Parameter(whole[1:5, 1:5])
        optimizer = ours(pair, [param])
        param.grad = torch.ones(4, 4, dtype=dtype)
        optimizer.step()
        frame = torch.ones(6, 6, dtype=torch.bool)
        frame[1:5, 1:5] = False
        assert whole[frame].eq(7).all() and not whole[1:5, 1:5].eq(7).any()

    def test_state_that_was_loaded_in_another_layout(self, pair, dtype):
        plain = make_params(dtype, ((2, 3, 4, 5),))
        a, b = ours(pair, plain), theirs(pair, copy_of(plain))
        run(a, b, range(2))
        last = nn.Parameter(plain[0].detach().contiguous(memory_format=torch.channels_last))
        c = ours(pair, [last])
        c.load_state_dict(a.state_dict())
        run(c, b, range(2, 5))


@pairs
def test_dtypes_may_be_mixed_in_a_group(pair):
    dtypes = (F32, F64, F16, BF16, F32)
    params = [p for dtype in dtypes for p in make_params(dtype, ((7,),))]
    wide = copy_of(params, F64)
    a, b = ours(pair, params), theirs(pair, wide)
    fill_grads(0, params)
    for p, q in zip(params, wide, strict=True):
        q.grad = p.grad.double()
    a.step()
    b.step()
    for p, q, dtype in zip(params, wide, dtypes, strict=True):
        assert p.dtype is dtype
        tolerance = {F64: 1e-13, F32: 1e-6, F16: 1e-3, BF16: 8e-3}[dtype]
        torch.testing.assert_close(p.double(), q, rtol=tolerance, atol=tolerance / 10)


@pairs
def test_several_groups_with_hyperparameters_of_their_own(pair):
    params = make_params()
    copies = copy_of(params)
    groups = [[{"params": ps[:3], "lr": 0.5}, {"params": ps[3:], "weight_decay": 0.3}] for ps in (params, copies)]
    run(ours(pair, groups[0]), theirs(pair, groups[1]))


@pytest.mark.parametrize("kind", KINDS)
class TestHalfParameters:
    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_fp32_gradients_are_taken(self, kind, dtype):
        a, b = make_params(dtype, ((9,),))[0], make_params(dtype, ((9,),))[0]
        a.grad_dtype = None
        a.grad = torch.linspace(-1, 1, 9)
        b.grad = a.grad.to(dtype).clone()
        kind([a], lr=0.5).step()
        kind([b], lr=0.5).step()
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)

    def test_fp16_with_the_default_eps_stays_finite(self, kind):
        """eps=1e-8 is 0 in fp16, and so is the square of a small gradient."""
        param = nn.Parameter(torch.ones(4, dtype=F16))
        optimizer = kind([param], weight_decay=0.0)
        for _ in range(3):
            param.grad = torch.tensor([0.0, 6e-8, 1e-4, 300.0], dtype=F16)
            optimizer.step()
        assert param.isfinite().all() and param[0] == 1

    def test_moments_are_fp32_and_hold_what_half_does_not(self, kind):
        param = nn.Parameter(torch.ones(3, dtype=F16))
        optimizer = kind([param], **takes(kind, momentum=0.9))
        param.grad = torch.full_like(param, 6e-8)
        optimizer.step()
        moments = [v for k, v in optimizer.state[param].items() if k != "step"]
        assert moments and all(m.dtype is F32 and m.gt(0).all() for m in moments)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != "sgd"])
def test_moments_in_bfloat16(pair):
    params = make_params()
    copies = copy_of(params)
    a, b = ours(pair, params, lr=0.01, state_dtype=BF16), theirs(pair, copies, lr=0.01)
    for step in range(5):
        fill_grads(step, params, copies)
        a.step()
        b.step()
    for p, q in zip(params, copies, strict=True):
        moments = moments_of(a, p)
        assert moments and (p.dim() == 0 or all(m.dtype is BF16 for m in moments))
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.02)
    assert not torch.equal(params[4], copies[4])


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_are_refused_before_anything_changes(kind):
    embedding, linear = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)
    optimizer = kind([*linear.parameters(), *embedding.parameters()], lr=0.1)
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = copy_of([*linear.parameters(), *embedding.parameters()])
    with pytest.raises(RuntimeError, match=f"{kind.__name__} does not support sparse .*sparse=False.*SparseAdam"):
        optimizer.step()
    assert all(map(same_bits, [*linear.parameters(), *embedding.parameters()], before))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_does_not_fit_is_an_error_before_anything_changes(kind):
    params = make_params(shapes=((3,), (4,)))
    fill_grads(0, params)
    params[1].grad_dtype = None
    params[1].grad = torch.ones(4, dtype=F64)
    before = copy_of(params)
    optimizer = kind(params, lr=0.1)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"grads\[1\]"):
        optimizer.step()
    assert all(map(same_bits, params, before))


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_changed_between_forward_and_backward_is_noticed(kind):
    """As with torch's optimizers: autograd must not use weights that are not those of the forward pass."""
    a, b = make_params(shapes=((3,), (3,)))
    loss = (a * b).sum()
    a.grad = torch.ones(3)
    kind([a], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pairs
class TestManyTensors:
    def test_of_all_sizes(self, pair):
        params = make_params(shapes=[(i % 7,) for i in range(1000)])
        run(ours(pair, params), theirs(pair, copy_of(params)), range(2))

    def test_of_one_element(self, pair):
        """10 000: more than any table of a launch holds."""
        params = make_params(shapes=[(1,)] * 10_000)
        whole = [nn.Parameter(torch.cat([p.detach() for p in params]))]
        optimizer = ours(pair, params)
        elementwise = TABLE[optimizer._row(optimizer.param_groups[0])]["n_norms"] == 0
        a, b = optimizer, theirs(pair, whole if elementwise else copy_of(params))
        for step in range(2):
            fill_grads(step, whole)
            for param, grad in zip(params, whole[0].grad.split(1), strict=True):
                param.grad = grad
            if not elementwise:
                for param, copy in zip(params, b.param_groups[0]["params"], strict=True):
                    copy.grad = param.grad
            a.step()
            b.step()
        close(torch.cat(params), torch.cat(b.param_groups[0]["params"]))

    @pytest.mark.parametrize("empty", [0, 150, 299])
    def test_an_empty_one_anywhere(self, pair, empty):
        params = make_params(shapes=[(3 + i % 5,) if i != empty else (0,) for i in range(300)])
        run(ours(pair, params), theirs(pair, copy_of(params)), range(2))
