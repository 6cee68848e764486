"""Every operation of the table, measured on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from megalowbit.errors import UserError
from megalowbit.optim.precision.autocast import (
    attach_autocast,
    autocast,
    contexts_for_checkpoint,
    device_kind,
)
from megalowbit.optim.precision.op_classes import AS_GIVEN, FLOAT16, FLOAT32, PROMOTE, OpClasses

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def x(*shape, low=0.1, high=0.9, seed=0):
    """Values in every function's domain."""
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=generator)


def signs(*shape):
    return torch.where(x(*shape, seed=3) > 0.5, 1.0, -1.0)


A, B, V, BATCH = x(8, 8), x(8, 8, seed=1), x(8, seed=2), x(2, 8, 8)
LABELS = torch.arange(8)
# op → (function of tensors, tensors), wherever it is not a function of one matrix
CALLS = {
    "linear": (F.linear, [A, B, V]),
    "matmul": (torch.matmul, [A, B]),
    "mm": (torch.mm, [A, B]),
    "mv": (torch.mv, [A, V]),
    "bmm": (torch.bmm, [BATCH, BATCH]),
    "addmm": (torch.addmm, [A, A, B]),
    "addmv": (torch.addmv, [V, A, V]),
    "addr": (torch.addr, [A, V, V]),
    "addbmm": (torch.addbmm, [A, BATCH, BATCH]),
    "baddbmm": (torch.baddbmm, [BATCH, BATCH, BATCH]),
    "chain_matmul": (torch.chain_matmul, [A, B, A]),
    "multi_dot": (lambda *m: torch.linalg.multi_dot(m), [A, B, A]),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [A, B]),
    "conv1d": (F.conv1d, [x(1, 4, 8), x(4, 4, 3)]),
    "conv2d": (F.conv2d, [x(1, 4, 8, 8), x(4, 4, 3, 3)]),
    "conv3d": (F.conv3d, [x(1, 2, 4, 4, 4), x(2, 2, 3, 3, 3)]),
    "conv_transpose1d": (F.conv_transpose1d, [x(1, 4, 8), x(4, 4, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [x(1, 4, 8, 8), x(4, 4, 3, 3)]),
    "conv_transpose3d": (F.conv_transpose3d, [x(1, 2, 4, 4, 4), x(2, 2, 3, 3, 3)]),
    "conv_tbc": (torch.conv_tbc, [x(8, 1, 4), x(3, 4, 4), x(4)]),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, [x(1, 2, 8, 8)] * 3),
    "prelu": (F.prelu, [A - 0.5, x(1)]),
    "pow": (lambda a: a**3, [A]),
    "softmax": (lambda a: F.softmax(a, -1), [A]),
    "log_softmax": (lambda a: F.log_softmax(a, -1), [A]),
    "softmin": (lambda a: F.softmin(a, -1), [A]),
    "logsumexp": (lambda a: a.logsumexp(-1), [A]),
    "layer_norm": (lambda a, w: F.layer_norm(a, (8,), w), [A, V]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (8,), w), [A, V]),
    "group_norm": (lambda a, w: F.group_norm(a, 2, w), [BATCH, V]),
    "local_response_norm": (lambda a: F.local_response_norm(a, 2), [BATCH]),
    "renorm": (lambda a: a.renorm(2, 0, 1.0), [A]),
    "cumsum": (lambda a: a.cumsum(-1), [A]),
    "cumprod": (lambda a: a.cumprod(-1), [A]),
    "logcumsumexp": (lambda a: a.logcumsumexp(-1), [A]),
    "var_mean": (lambda a: torch.var_mean(a)[0], [A]),
    "std_mean": (lambda a: torch.std_mean(a)[0], [A]),
    "dist": (torch.dist, [A, B]),
    "cdist": (torch.cdist, [A, B]),
    "pdist": (F.pdist, [A]),
    "cross_entropy": (lambda a: F.cross_entropy(a, LABELS), [A]),
    "nll_loss": (lambda a: F.nll_loss(a, LABELS), [A]),
    "multi_margin_loss": (lambda a: F.multi_margin_loss(a, LABELS), [A]),
    "multilabel_margin_loss": (lambda a: F.multilabel_margin_loss(a, LABELS.expand(8, 8)), [A]),
    "cosine_embedding_loss": (lambda a, b: F.cosine_embedding_loss(a, b, signs(8)), [A, B]),
    "margin_ranking_loss": (F.margin_ranking_loss, [A, B, signs(8, 8)]),
    "gaussian_nll_loss": (F.gaussian_nll_loss, [A, B, x(8, 8, seed=5)]),
    "triplet_margin_loss": (F.triplet_margin_loss, [A, B, x(8, 8, seed=5)]),
    "ctc_loss": (
        lambda a: F.ctc_loss(a, LABELS[1:3].expand(8, 2), torch.full((8,), 8), torch.full((8,), 2)),
        [x(8, 8, 8).log()],
    ),
    "where": (lambda a, b: torch.where(A > 0.5, a, b), [A, B]),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.25), [A, B]),
    "addcmul": (torch.addcmul, [A, A, B]),
    "addcdiv": (torch.addcdiv, [A, A, B]),
    "dot": (torch.dot, [V, V]),
    "vdot": (torch.vdot, [V, V]),
    "inner": (torch.inner, [V, V]),
    "outer": (torch.outer, [V, V]),
    "cross": (torch.linalg.cross, [x(8, 3), x(8, 3, seed=1)]),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), [A, B]),
    "bilinear": (F.bilinear, [A, A, x(4, 8, 8)]),
    "grid_sample": (lambda a, g: F.grid_sample(a, g, align_corners=False), [x(1, 2, 4, 4), x(1, 3, 3, 2)]),
    "scatter": (lambda a, b: a.scatter(0, LABELS.expand(8, 8), b), [A, B]),
    "scatter_add": (lambda a, b: a.scatter_add(0, LABELS.expand(8, 8), b), [A, B]),
    "index_add": (lambda a, b: a.index_add(0, LABELS, b), [A, B]),
    "index_copy": (lambda a, b: a.index_copy(0, LABELS, b), [A, B]),
    "index_put": (lambda a, b: a.index_put((LABELS,), b), [A, B]),
    **{
        op: (lambda a, b, op=op: getattr(torch, op)([a, b]), [A, B])
        for op in ("cat", "stack", "hstack", "vstack")
    },
}
TWO_MATRICES = {
    "div",
    "mul",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "poisson_nll_loss",
    "pairwise_distance",
    "hypot",
    "maximum",
    "l1_loss",
    "mse_loss",
    "sub",
    "smooth_l1_loss",
    "minimum",
    "hinge_embedding_loss",
    "binary_cross_entropy",
    "atan2",
    "cosine_similarity",
    "huber_loss",
    "add",
    "kl_div",
    "multilabel_soft_margin_loss",
}


def call_of(op):
    if op in CALLS:
        return CALLS[op]
    homes = [home for home in (F, torch, torch.special) if hasattr(home, op)]
    return getattr(homes[0], op), [A, B] if op in TWO_MATRICES else [A]


def rounded(tensors, half):
    """The same values in half and in fp32, exactly."""
    halves = [tensor.to(half) for tensor in tensors]
    return halves, [tensor.float() for tensor in halves]


def error(got, reference):
    return ((got.double() - reference).abs().max() / reference.abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("op", FLOAT16)
def test_products_of_fp32_tensors_come_out_in_half_precision(op, precision):
    function, tensors = call_of(op)
    assert function(*tensors).dtype == torch.float32
    with autocast(precision, "cpu"):
        assert function(*tensors).dtype == HALVES[precision]


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("op", FLOAT32)
def test_fp32_ops_of_half_tensors_are_computed_in_fp32(op, precision):
    function, tensors = call_of(op)
    halves, wide = rounded(tensors, HALVES[precision])
    reference = function(*[tensor.double() for tensor in wide])
    with autocast(precision, "cpu"):
        got = function(*halves)
    assert got.dtype == torch.float32
    # Half precision's rounding would be 5e-4 (fp16) or 4e-3 (bf16).
    assert error(got, reference) < 1e-5


@pytest.mark.parametrize("op", PROMOTE)
def test_ops_on_several_tensors_take_the_widest_type_whichever_it_is(op):
    function, tensors = call_of(op)
    halves, wide = rounded(tensors, torch.float16)
    reference = function(*[tensor.double() for tensor in wide])
    with autocast("fp16", "cpu"):
        assert function(*halves).dtype == torch.float16
        for index in range(len(tensors)):
            mixed = [wide[i] if i == index else halves[i] for i in range(len(tensors))]
            got = function(*mixed)
            assert got.dtype == torch.float32
            assert error(got, reference) < 1e-5


@pytest.mark.parametrize("op", AS_GIVEN)
def test_all_other_ops_run_in_the_dtype_of_their_inputs(op):
    calls = {
        "embedding": lambda a: F.embedding(LABELS, a),
        "batch_norm": lambda a: F.batch_norm(a, torch.zeros(8), torch.ones(8), training=True),
        "clamp": lambda a: a.clamp(0, 1),
        "instance_norm": lambda a: F.instance_norm(a[None]),
    }
    function = calls.get(op) or next(getattr(home, op) for home in (F, torch) if hasattr(home, op))
    with autocast("bf16", "cpu"):
        for dtype in (torch.bfloat16, torch.float32):
            assert function(A.to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a: a @ a.float(), torch.float16),
        (lambda a: a.matmul(a), torch.float16),
        (lambda a: 2**a, torch.float32),
        (lambda a: a**2, torch.float32),
        (lambda a: a.pow(2), torch.float32),
        (lambda a: a.softmax(-1), torch.float32),
        (lambda a: torch.special.softmax(a, -1), torch.float32),
        (lambda a: torch.linalg.vector_norm(a), torch.float32),
        (lambda a: a.norm(), torch.float32),
        (lambda a: F.logsigmoid(a), torch.float32),
        (lambda a: 1 - a, torch.float16),
        (lambda a: 1 / a, torch.float16),
        (lambda a: a - a.float(), torch.float32),
        (lambda a: a / a, torch.float16),
        (lambda a: torch.concat([a, a.float()]), torch.float32),
    ],
)
def test_methods_operators_and_aliases_are_the_same_op(function, expected):
    with autocast("fp16", "cpu"):
        assert function(A.half()).dtype == expected


def test_a_value_that_half_precision_cannot_hold_survives():
    a = torch.full((4,), 300.0).half()
    assert (a**2).isinf().all()
    with autocast("fp16", "cpu"):
        assert torch.equal(a**2, torch.full((4,), 90000.0))
        assert torch.equal(a.sum() * 100, torch.tensor(120000.0))


def test_a_scalar_keeps_its_value_and_does_not_widen():
    with autocast("fp16", "cpu"):
        scaled = A.half() * torch.tensor(1e5) * torch.tensor(1e-5)
        assert scaled.dtype == torch.float16
        assert torch.equal(torch.full((2,), 1e-4).half() * torch.tensor(1e5), torch.full((2,), 10.0).half())


def test_fp64_integers_explicit_types_and_outputs_are_unchanged():
    out = torch.empty(8, 8).half()
    with autocast("fp16", "cpu"):
        assert A.double().exp().dtype == torch.float64
        assert LABELS.sum().dtype == torch.int64
        assert A.half().sum(dtype=torch.float16).dtype == torch.float16
        assert F.softmax(A.half(), -1, dtype=torch.float64).dtype == torch.float64
        assert torch.exp(A.half(), out=out) is out
        half = A.half()
        assert half.exp_() is half


@pytest.mark.parametrize(
    ("changes", "function", "expected"),
    [
        ({"float32": ["matmul"]}, lambda a: a @ a, torch.float32),
        ({"float32": ["gelu"]}, F.gelu, torch.float32),
        ({"float16": ["softmax"]}, lambda a: F.softmax(a.float(), -1), torch.float16),
        ({"promote": ["matmul"]}, lambda a: a @ a.float(), torch.float32),
        ({"promote": ["linear"]}, lambda a: F.linear(a, a), torch.float16),
        ({"float16": ["cross_entropy"]}, lambda a: F.cross_entropy(a.float(), LABELS), torch.float16),
    ],
)
def test_changes_override_torchs_list(changes, function, expected):
    classes = OpClasses.default().with_changes(**changes)
    with autocast("fp16", "cpu", classes):
        assert function(A.half()).dtype == expected


def test_ops_in_no_class_run_in_the_dtype_of_their_inputs():
    with autocast("fp16", "cpu", OpClasses(float32=("exp",))):
        assert (A @ A).dtype == torch.float32
        assert F.cross_entropy(A.half(), LABELS).dtype == torch.float16
        assert A.half().exp().dtype == torch.float32


def test_disabled_and_inner_regions_are_respected():
    loud = OpClasses.default().with_changes(float32=["matmul", "gelu"])
    a = A.half()
    with autocast("fp16", "cpu", loud):
        with torch.autocast("cpu", enabled=False):
            assert a.exp().dtype == torch.float16
        assert (a @ a).dtype == F.gelu(a).dtype == torch.float32
        with autocast("bf16", "cpu"):
            assert (a @ a).dtype == torch.bfloat16
            assert F.gelu(a).dtype == torch.float16
        assert F.gelu(a).dtype == torch.float32
    assert a.exp().dtype == torch.float16
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_inside_leaves_autocast_as_it_was():
    with autocast("fp16", "cpu"):
        with pytest.raises(RuntimeError):
            F.layer_norm(A, (7,))
        assert torch.is_autocast_enabled("cpu")
    assert A.half().exp().dtype == torch.float16


def test_gradients_arrive_in_the_parameters_type_and_equal_those_of_the_casts_by_hand():
    weight = A.half().requires_grad_()
    with autocast("fp16", "cpu"):
        loss = F.cross_entropy(F.softmax(F.linear(B.half(), weight), -1), LABELS)
    loss.backward()
    by_hand = A.half().requires_grad_()
    F.cross_entropy(F.softmax(F.linear(B.half(), by_hand).float(), -1), LABELS).backward()
    assert weight.grad.dtype == torch.float16
    assert torch.equal(weight.grad, by_hand.grad)


def test_weights_cast_without_gradients_get_gradients_later():
    weight = A.clone().requires_grad_()
    with autocast("bf16", "cpu"):
        with torch.no_grad():
            F.linear(B, weight)
        F.linear(B, weight).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_may_be_a_type_or_a_device(device):
    model = torch.nn.Softmax(-1)
    attach_autocast(model, "fp16", device)
    with autocast("fp16", device):
        assert A.half().exp().dtype == torch.float32
    assert model(A.half()).dtype == torch.float32
    assert device_kind(torch.device("cuda", 1)) == "cuda"


@pytest.mark.parametrize("device", ["gpu", "", "meta", None, [], 1.5])
def test_a_device_without_autocast_is_rejected_in_one_line(device):
    model = torch.nn.Linear(1, 1)
    for use in (lambda: autocast("fp16", device).__enter__(), lambda: attach_autocast(model, "fp16", device)):
        with pytest.raises(UserError, match=r"device_type = .* for autocast is not valid: pass") as caught:
            use()
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="device_type"):
        contexts_for_checkpoint(None, device)
    assert not model._forward_pre_hooks


def test_classes_may_be_given_as_changes_only():
    model = torch.nn.GELU()
    attach_autocast(model, "fp16", "cpu", {"float32": ["gelu"]})
    with autocast("fp16", "cpu", {"float32": ["gelu"], "float16": ["exp"]}):
        assert F.gelu(A.half()).dtype == torch.float32
        assert A.exp().dtype == torch.float16
        assert A.half().log().dtype == torch.float32
    assert model(A.half()).dtype == torch.float32


@pytest.mark.parametrize("classes", ["gelu", ["gelu"], 3, {"fp32": ["gelu"]}, {"float32": [["gelu"]]}])
def test_invalid_op_classes_are_rejected_before_any_hook_is_set(classes):
    model = torch.nn.Linear(1, 1)
    for use in (
        lambda: autocast("fp16", "cpu", classes).__enter__(),
        lambda: attach_autocast(model, "fp16", "cpu", classes),
        lambda: contexts_for_checkpoint(classes, "cpu"),
    ):
        with pytest.raises(UserError) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("precision", [None, [], torch.float16, 16])
def test_a_precision_of_another_type_is_refused(precision):
    with pytest.raises(UserError, match="unknown precision for autocast"):
        attach_autocast(torch.nn.Linear(1, 1), precision, "cpu")


def test_an_unknown_precision_is_refused():
    with pytest.raises(UserError, match="unknown precision for autocast 'fp8'"), autocast("fp8", "cpu"):
        pass
    with pytest.raises(UserError, match="fp16, bf16"):
        attach_autocast(torch.nn.Linear(1, 1), "fp32", "cpu")
