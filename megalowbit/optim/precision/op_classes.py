"""Which operations run in half precision, which in fp32, and which in the widest type of their arguments.

- Products run in half precision, because tensor cores accumulate in fp32 anyway.
- Operations that grow faster than their argument (exp, pow), sum many elements (softmax, norms, sums) or are
  losses run in fp32.
- Operations on several tensors use the widest type.
- All other operations named here run in the type of their arguments, as most activations can: they only
  compare, or their kernels compute in fp32 and round once. This includes batch and instance norm, which write
  running statistics into their arguments: with a cast they would write into a copy.

`"autocast"` of the configuration moves operations between the classes. This file is plain Python, so a
misspelt operation is an error of the configuration before torch is imported. `autocast` applies the classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from megalowbit.errors import UserError, shown, unknown_name
from megalowbit.values import SettingsModel

OpClass = Literal["float16", "float32", "promote"]


def _ops(names: str) -> tuple[str, ...]:
    return tuple(names.split())


FLOAT16 = _ops(
    """
    linear matmul mm mv bmm addmm addmv addr addbmm baddbmm chain_matmul multi_dot einsum
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    scaled_dot_product_attention prelu
    """
)
FLOAT32 = _ops(
    """
    exp exp2 expm1 log log2 log10 log1p pow square rsqrt reciprocal sinh cosh tan acos asin erfinv
    softmax log_softmax softmin logsumexp softplus logsigmoid
    layer_norm rms_norm group_norm local_response_norm normalize renorm
    sum nansum mean nanmean prod cumsum cumprod logcumsumexp trace var std var_mean std_mean norm dist cdist
    pdist cosine_similarity pairwise_distance
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
    binary_cross_entropy_with_logits gaussian_nll_loss poisson_nll_loss cosine_embedding_loss
    hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss ctc_loss
    """
)
PROMOTE = _ops(
    """
    add sub mul div maximum minimum where cat stack hstack vstack lerp addcmul addcdiv atan2 hypot
    dot vdot inner outer cross tensordot bilinear grid_sample
    scatter scatter_add index_add index_copy index_put
    """
)
AS_GIVEN = _ops(
    """
    relu relu6 leaky_relu elu celu selu gelu silu mish glu hardtanh hardsigmoid hardswish softsign tanh
    sigmoid erf erfc sqrt abs neg sin cos clamp dropout embedding batch_norm instance_norm
    amax amin
    """
)
KNOWN = frozenset(FLOAT16 + FLOAT32 + PROMOTE + AS_GIVEN)
CLASSES: tuple[OpClass, ...] = get_args(OpClass)


@dataclass(frozen=True, kw_only=True)
class OpClasses:
    """Names of operations by the precision they run in; others run in the type of their arguments.

    A name covers the function, the method and the operators of the same meaning: `pow` covers `torch.pow`,
    `x.pow(2)` and `x**2`; `norm` also covers those of `torch.linalg`. In-place operations, and calls with an
    explicit dtype or output tensor, are never cast.

    Attributes:
        float16: inputs are cast to autocast's half precision, which may be bfloat16.
        float32: half-precision inputs are cast to fp32, and the result is fp32.
        promote: inputs are cast to the widest of their types; scalars and 0-dim tensors do not count.

    Raises:
        UserError: a name is unknown, or in two classes.
    """

    float16: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        owner: dict[str, OpClass] = {}
        for name in CLASSES:
            ops = checked_names(getattr(self, name), name)
            object.__setattr__(self, name, ops)
            for op in ops:
                if owner.setdefault(op, name) != name:
                    raise UserError(f"op {op!r} is in {owner[op]} and in {name}: leave it in one of them")

    @classmethod
    def default(cls) -> OpClasses:
        """The classes of this file."""
        return cls(float16=FLOAT16, float32=FLOAT32, promote=PROMOTE)

    @classmethod
    def given(cls, classes: OpClasses | Mapping[str, Iterable[str]] | None) -> OpClasses:
        """The classes described by a caller's argument.

        Args:
            classes: an `OpClasses`, which is returned; or operations to move from the default, as in the
                configuration: `{"float32": ["gelu"]}`; or None, the default.

        Raises:
            UserError: another type, an unknown class or operation.
        """
        if classes is None:
            return cls.default()
        if isinstance(classes, OpClasses):
            return classes
        if not isinstance(classes, Mapping):
            raise UserError(
                f"classes = {shown(classes)} of operations is not valid: pass an OpClasses, or operations to "
                'move, such as {"float32": ["gelu"]}'
            )
        for name in classes:
            if name not in CLASSES:
                raise unknown_name("class of operations", name, CLASSES)
        return cls.default().with_changes(**classes)

    def with_changes(
        self, *, float16: Iterable[str] = (), float32: Iterable[str] = (), promote: Iterable[str] = ()
    ) -> OpClasses:
        """These classes with some operations moved to another class.

        Raises:
            UserError: a name is unknown, or is moved to two classes.
        """
        moved = OpClasses(
            float16=checked_names(float16, "float16"),
            float32=checked_names(float32, "float32"),
            promote=checked_names(promote, "promote"),
        )
        elsewhere = moved.class_of_each()
        return OpClasses(
            **{
                name: (*(op for op in getattr(self, name) if op not in elsewhere), *getattr(moved, name))
                for name in CLASSES
            }
        )

    def class_of_each(self) -> dict[str, OpClass]:
        """The class of every operation that has one."""
        return {op: name for name in CLASSES for op in getattr(self, name)}


def checked_names(names: Any, where: str) -> tuple[str, ...]:
    """Names of operations, each once, in the given order.

    Raises:
        UserError: a name is unknown (the message suggests the nearest), or this is not a list of names.
    """
    if isinstance(names, str):
        raise UserError(f"{where} = {names!r}: expected a list of ops, [{names!r}]")
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise UserError(f'{where} = {shown(names)}: expected a list of ops, such as ["gelu"]')
    given = tuple(names)
    for name in given:
        if not isinstance(name, str) or name not in KNOWN:  # a list has no hash
            near = difflib.get_close_matches(str(name), sorted(KNOWN), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(
                f"unknown op {shown(name)} in {where}: {hint}"
                "docs/mixed-precision.md lists the ops that can be put into a class"
            )
    return tuple(dict.fromkeys(given))


def _listed_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError('expected a list of ops, for example ["gelu"]')
    return checked_names(value, "the list")


Ops = Annotated[tuple[str, ...], BeforeValidator(_listed_names)]


class AutocastSettings(SettingsModel):
    """The precision that each operation runs in, by class.

    See [the table of operations](mixed-precision.md#operations-by-class). Besides an object, `true` and
    `false` are allowed. An object turns autocast on: `{"float32": ["gelu"]}`.
    """

    enabled: bool = Field(
        default=True,
        description="run operations in the precision of their class. `false`: in the precision of their "
        "inputs",
    )
    float16: Ops = Field(
        default=(), description="operations that run in half precision, in addition to those of the table"
    )
    float32: Ops = Field(default=(), description="operations that run in fp32, likewise")
    promote: Ops = Field(default=(), description="operations that run in the widest type of their inputs")

    @model_validator(mode="before")
    @classmethod
    def _from_a_boolean(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return {"enabled": value}
        if not isinstance(value, (dict, cls)):
            raise ValueError('expected true, false, or ops to move, for example {"float32": ["gelu"]}')
        return value

    @model_validator(mode="after")
    def _each_op_has_one_class(self) -> AutocastSettings:
        self.op_classes()
        return self

    def op_classes(self) -> OpClasses:
        """The default table with these changes."""
        return OpClasses.default().with_changes(
            float16=self.float16, float32=self.float32, promote=self.promote
        )
