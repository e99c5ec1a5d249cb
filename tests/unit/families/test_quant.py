"""Quantisation blocks: what is known is read right, the rest is refused by field, value and what is supported."""

from __future__ import annotations

from typing import Any

import pytest

from moegate.errors import UsageError
from moegate.families import Layout, layout_of
from moegate.families.modules import Unclear, experts_named

MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 1280, "n_routed_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 896, "num_hidden_layers": 4, "first_k_dense_replace": 1,
}  # fmt: skip
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def layout(block: dict[str, Any], **fields: Any) -> Layout:
    return layout_of({**MODEL, **fields, "quantization_config": block}, file="m/config.json")


def group(weights: Any, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights, **fields}}}


def groups(**targets: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = {name: {"targets": [target], "weights": weights} for name, (target, weights) in targets.items()}
    return {"quant_method": "compressed-tensors", "config_groups": made}


@pytest.mark.parametrize(
    ("block", "dtype", "shape", "channel"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_w8a8", None, False),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "fp8_w8a8", (128, 128), False),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8_w8a8", None, True),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "fp8_w8a8", (1, 32), False),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
         "nvfp4_w4a16", (1, 16), False),
        ({"quant_algo": "FP8_PB_WO"}, "fp8_w8a8", (128, 128), False),
        ({"quantization": {"quant_algo": "FP8"}}, "fp8_w8a8", None, False),
        ({"quant_method": "modelopt_fp4"}, "nvfp4_w4a16", (1, 16), False),
        ({"quant_method": "intel/auto-round", "bits": 4, "group_size": 128}, "int4_w4a16", (0, 128), False),
        (group({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}),
         "fp8_w8a8", (128, 128), False),
        (group({"num_bits": 8, "type": "float"}), "fp8_w8a8", None, False),
        (group({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}), "mxfp4_w4a16", (1, 32), False),
        (group({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
         "nvfp4_w4a16", (1, 16), False),
        (group({"num_bits": 4, "type": "int", "strategy": "channel"}), "int4_w4a16", None, False),
        (group(INT4), "int4_w4a16", (0, 32), False),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]}},
         "fp8_w8a8", None, False),
        ({"quant_method": "quark",
          "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}},
         "mxfp4_w4a16", (1, 32), False),
    ],
)  # fmt: skip
def test_what_is_known_is_read_right(block: dict[str, Any], dtype: str, shape: Any, channel: bool) -> None:
    quant = layout(block).quant
    assert (quant.dtype, quant.block_shape, quant.per_channel) == (dtype, shape, channel)


def _modelopt(algorithm: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **fields}


def _quark(weight: Any, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, **fields}


_G, _Q = "config_groups.group_0", "global_quant_config.weight"


@pytest.mark.parametrize(
    ("block", "field", "said"),
    [
        ({"quant_method": "fbgemm_fp8"}, "quant_method", "'fbgemm_fp8'"),
        (_modelopt("INT4_AWQ"), "quant_algo", "'INT4_AWQ'"),
        (_modelopt("W4A16_AWQ"), "quant_algo", "'W4A16_AWQ'"),
        (_modelopt("MIXED_PRECISION"), "quant_algo", "FP8_PB_WO, MXFP8, NVFP4"),
        ({"quant_method": "modelopt"}, "quant_algo", "is missing"),
        ({"quant_method": "modelopt", "quantization": {}}, "quantization.quant_algo", "is missing"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "FP8"}, "quant_algo", "'FP8' under quant_method modelopt_fp4"),
        (_modelopt("NVFP4", group_size=32), "group_size", "is 32 under NVFP4"),
        (group({**FP8, "strategy": "block"}), f"{_G}.weights.block_structure", "missing under strategy block"),
        (group({**FP8, "strategy": "block", "block_structure": "128"}), f"{_G}.weights.block_structure", "'128'"),
        (group({**FP8, "strategy": "block", "block_structure": "0x9"}), f"{_G}.weights.block_structure", "is 0"),
        (group({**FP8, "strategy": "group", "group_size": 32}), f"{_G}.weights.strategy", "tensor, channel or block"),
        (group({**FP8, "strategy": "magic"}), f"{_G}.weights.strategy", "'magic'"),
        (group({**FP8, "strategy": ["channel"]}), f"{_G}.weights.strategy", "['channel']"),
        (group({"num_bits": 4, "type": "float"}), f"{_G}.weights.group_size", "16 under tensor_group"),
        (group({"num_bits": 4, "type": "float", "group_size": 64}), f"{_G}.weights.group_size", "is 64"),
        (group({**INT4, "strategy": "group", "group_size": None}), f"{_G}.weights.group_size", "is None"),
        (group(INT4, input_activations={"num_bits": 8}), f"{_G}.weights", "with 8-bit 'int' activations"),
        (group({"num_bits": 3, "type": "int"}), f"{_G}.weights", "3-bit 'int' weights"),
        (group(None), f"{_G}.weights", "is missing"),
        (group([]), f"{_G}.weights", "must be an object"),
        (group(FP8, targets="Linear"), f"{_G}.targets", "'Linear'"),
        ({"quant_method": "compressed-tensors"}, "config_groups", "at least one group"),
        (_quark([{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]), _Q, "quantised once"),
        (_quark({"dtype": "int4", "qscheme": "per_group"}), f"{_Q}.dtype", "'int4'"),
        (_quark({"dtype": "fp8_e5m2", "qscheme": "per_tensor"}), f"{_Q}.dtype", "'fp8_e5m2'"),
        (_quark({"dtype": "fp8_e4m3", "qscheme": "per_group"}), f"{_Q}.qscheme", "per_tensor, per_channel"),
        (_quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 16}), f"{_Q}.group_size", "is 16"),
        (_quark({"dtype": "int8", "qscheme": "per_tensor"}, layer_quant_config={"*experts*": {}}),
         "layer_quant_config", "'*experts*'"),
        ({"quant_method": "awq", "group_size": 128}, "bits", "4 or 8"),
        ({"quant_method": "gptq", "bits": 4}, "group_size", "is None"),
        ({"quant_method": "gptq", "bits": 4.0, "group_size": 128}, "bits", "is 4.0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*experts.*": {"bits": 8}}},
         "dynamic", "'+:.*experts.*'"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers", "must be a list of names"),
        ({"quant_method": "fp8", "ignored_layers": ["mlp"]}, "ignored_layers", "'mlp'"),
    ],
)  # fmt: skip
def test_the_rest_is_refused_by_field_and_value(block: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        layout(block)
    assert caught.value.field == f"quantization_config.{field}"
    assert said in str(caught.value)
    assert caught.value.file == "m/config.json"


def test_a_block_under_its_other_name_is_named_so() -> None:
    with pytest.raises(UsageError) as caught:
        layout_of({**MODEL, "compression_config": {"quant_method": "gptq", "bits": 3}})
    assert caught.value.field == "compression_config.bits"


def test_of_groups_that_differ_the_one_of_the_experts_counts() -> None:
    attention, experts = ("re:.*self_attn.*", FP8), ("re:.*mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$", INT4)
    assert layout(groups(a=attention, b=experts)).quant.dtype == "int4_w4a16"
    assert layout(groups(a=("Linear", FP8), b=experts)).quant.dtype == "int4_w4a16"
    assert layout(groups(a=attention, b=("Linear", INT4))).quant.dtype == "int4_w4a16"
    assert layout(groups(a=("Linear", INT4), b=("re:.*mlp.*", INT4))).quant.dtype == "int4_w4a16"
    for differing in (
        groups(a=("Linear", FP8), b=("re:.*mlp.*", INT4)),
        groups(a=("re:.*experts.*gate_proj", FP8), b=("Linear", INT4)),
        groups(a=("re:.*experts.*", FP8), b=("re:.*layers.3.*", INT4)),
    ):
        with pytest.raises(UsageError, match="a and b differ") as caught:
            layout(differing)
        assert caught.value.field == "quantization_config.config_groups"
    with pytest.raises(UsageError, match="no group for the experts"):
        layout(groups(a=attention))


def several(*targets: str) -> dict[str, Any]:
    """A group for these targets, and one of another dtype for all other linear layers."""
    made = groups(rest=("Linear", FP8))
    made["config_groups"]["named"] = {"targets": list(targets), "weights": INT4}
    return made


@pytest.mark.parametrize(
    "targets",
    [
        ["re:.*gate_proj.*", "re:.*up_proj.*", "re:.*down_proj.*"],
        ["re:.*(q|k|v|o|gate|up|down)_proj$"],
        ["re:.*\\.(gate_proj|up_proj|down_proj)$"],
        ["re:.*mlp.*_proj"],
        ["re:.*_proj$|lm_head"],
        ["re:.*gate_proj|.*up_proj|.*down_proj"],
        ["re:.+gate_proj", "re:.+up_proj", "re:.+down_proj"],
        ["re:.*w1", "re:.*w2", "re:.*w3"],
        ["re:.*experts.*gate_proj", "re:.*experts.*up_proj", "re:.*experts.*down_proj"],
    ],
)  # fmt: skip
def test_targets_that_name_every_projection_name_the_experts(targets: list[str]) -> None:
    assert layout(several(*targets)).quant.dtype == "int4_w4a16"
    left = layout({**group(FP8), "ignore": targets})
    assert (left.quant.dtype, len(left.conflicts)) == (None, 1)


def test_targets_of_one_projection_are_no_choice_and_those_of_other_modules_none() -> None:
    for target in ("re:.*gate_proj", "re:.*mlp.*down_proj$", "re:.*experts.*up_proj"):
        with pytest.raises(UsageError, match="rest and named differ"):
            layout(several(target))
        with pytest.raises(UsageError, match="leaves out some experts or projections"):
            layout({**group(FP8), "ignore": [target]})
    for target in ("re:.*mlp\\.(gate|up|down)_proj$", "re:.*shared_experts.*_proj", "re:.*self_attn.*_proj",
                   "re:.*gate$", "re:.*\\.proj$", "re:.*[qkv]_proj", "re:.*in_proj", "re:.*visual.*proj",
                   "re:.*gate.*"):  # fmt: skip
        assert layout(several(target)).quant.dtype == "fp8_w8a8"
        assert layout({**group(INT4), "ignore": [target]}).quant.dtype == "int4_w4a16"


def test_an_override_counts_where_it_reaches_experts_of_the_model() -> None:
    block = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for name in ("-:model.layers.0.", "+:model.layers.4.mlp.experts.0.gate_proj", "-:.*mlp\\.gate.*"):
        assert layout({**block, "dynamic": {name: {}}}).quant.dtype == "int4_w4a16"
    for name in ("-:model.layers.1.", "+:.*down_proj.*", "+:model.layers.3.mlp.experts.0.gate_proj"):
        with pytest.raises(UsageError, match="quantisation of its own"):
            layout({**block, "dynamic": {name: {"bits": 8}}})


EXPLICIT = [f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj"
            for layer in (1, 2, 3) for expert in (0, 1) for kind in ("gate", "up", "down")]  # fmt: skip


@pytest.mark.parametrize(
    "block",
    [
        {**group(FP8), "ignore": ["lm_head", "re:.*experts.*"]},
        {**group(FP8), "ignore": ["re:.*mlp\\.experts\\.\\d+\\.(gate|up|gate_up|down)_proj.*"]},
        {**group(FP8), "ignore": EXPLICIT},
        {"quant_method": "fp8", "modules_to_not_convert": ["experts"]},
        _modelopt("NVFP4", exclude_modules=["model.layers.*.mlp.experts*"]),
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["*experts*"]}},
    ],
)
def test_experts_that_are_left_out_are_not_quantised(block: dict[str, Any]) -> None:
    read = layout(block)
    assert (read.quant.method, read.quant.dtype, read.quant.per_channel) == (block["quant_method"], None, False)
    assert read.key("X").dtype is None
    assert read.conflicts == ("quantization_config leaves the experts out: their weights are not quantised",)


@pytest.mark.parametrize(
    "names",
    [
        ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        ["model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate", "model.layers.0.mlp.down_proj"],
        ["model.layers.0.mlp*", "model.layers.4.mlp.experts.0.gate_proj", "mtp.layers.1.mlp.experts"],
        ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head", "backbone.layers.1.mixer.in_proj"],
        ["re:.*router$", "re:.*mlp$", "re:vision_model.*", "visual.blocks.3.mlp"],
        [],
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_other_modules_may_be_left_out(names: list[str], method: str) -> None:
    block = {**group(FP8), "quant_method": method, "ignore": names}
    read = layout(block)
    assert read.quant.dtype == "fp8_w8a8"
    assert read.conflicts == ()


def test_a_layer_that_is_left_out_is_told_and_a_part_of_one_refused() -> None:
    read = layout({"quant_method": "fp8", "ignored_layers": ["model.layers.3", "model.layers.1.mlp.experts"]})
    assert read.quant.dtype == "fp8_w8a8"
    assert read.conflicts == (
        "quantization_config leaves the experts of layer 1, 3 out: those of the other layers count",
    )
    for names in (EXPLICIT[:1], EXPLICIT[:3], ["re:.*experts.*down_proj"], ["re:.*experts.0.*"], ["re:.*"],
                  ["re:^(?!.*experts).*"], ["re:.*(self_attn|mlp).*"], ["re:.*(experts|self_attn).*"]):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            layout({**group(FP8), "ignore": names})
        assert caught.value.field == "quantization_config.ignore"


def test_names_are_not_run_as_patterns() -> None:
    with pytest.raises(Unclear):
        experts_named("re:(" + "(x+x+)+" * 40 + "experts")
    assert experts_named("re:" + "(a+)+" * 1000 + "lm_head") is None
