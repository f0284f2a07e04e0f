from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.layout import (
    Layout,
    chunk_layers,
    divisors,
    layers_per_stage,
    layout_violations,
    nearest_divisor,
    stage_layers,
)
from meshwright.profiles.model_shape import ModelSpec, model_from_config

LAYOUTS = [
    Layout(),
    Layout(tp=2, pp=3, dp=4),
    Layout(tp=4, dp=2, sp=True),
    Layout(pp=8),
    Layout(tp=2, dp=8, sp=True, ep=4),
    Layout(tp=4, pp=2, dp=8, sp=True, ep=32, etp=1),
    Layout(tp=2, pp=4, vpp=3, sp=True),
]


def llama(**keys: int) -> ModelSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 30,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    return model_from_config(config | keys, name="llama")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_is_read_back_from_its_text(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_absent_axes_are_one() -> None:
    assert Layout.parse("dp2") == Layout(dp=2)
    assert Layout.parse("sp, tp2") == Layout(tp=2, sp=True)


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(tp=2, pp=2, dp=2, cp=2, vpp=2)], ids=str)
def test_coordinates_and_index_are_inverse_and_use_every_rank(layout: Layout) -> None:
    seen = set()
    for index in range(layout.num_ranks):
        place = layout.coordinates(index)
        assert layout.index(**place._asdict()) == index
        seen.add(place)
    assert len(seen) == layout.num_ranks


@pytest.mark.parametrize(("text", "axis"), [("tp2,pp1,tp4", "tp"), ("sp,sp,tp2", "sp")])
def test_a_layout_that_gives_an_axis_twice_is_refused(text: str, axis: str) -> None:
    with pytest.raises(BadInput, match=f"layout '{text}' gives {axis} twice; keep one"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["tp", "xp2", "tp2;pp1", ""])
def test_a_malformed_layout_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match="write it like 'tp2,pp1,dp2'"):
        Layout.parse(text)


def test_a_degree_of_zero_and_sequence_parallelism_alone_are_refused() -> None:
    with pytest.raises(BadInput, match="pp=0 is not a degree"):
        Layout(pp=0)
    with pytest.raises(BadInput, match="needs tp of 2 or more"):
        Layout(sp=True)


def test_experts_are_spread_over_a_part_of_the_replicas() -> None:
    assert str(Layout(tp=4, pp=2, dp=8, ep=8)) == "tp4,pp2,dp8,ep8"
    assert Layout(tp=4, pp=2, dp=8, ep=8).num_ranks == 64
    with pytest.raises(BadInput, match=r"layout ep=3 does not divide dp=8; use ep=2\."):
        Layout(dp=8, ep=3)


def test_a_layout_is_written_with_all_its_degrees_and_read_again() -> None:
    written = TypeAdapter(Layout)
    assert written.dump_python(Layout(tp=2, dp=4)) == {
        **{"tp": 2, "pp": 1, "dp": 4, "sp": False, "ep": 1, "cp": 1, "vpp": 1},
        "etp": 2,
    }
    for layout in (Layout(dp=4), Layout(dp=4, ep=2), Layout(tp=2, dp=2), Layout(tp=2, dp=2, ep=4, etp=1)):
        assert written.validate_json(written.dump_json(layout)) == layout


def test_experts_are_whole_or_cut_by_tensor_parallelism() -> None:
    whole = Layout(tp=4, pp=2, dp=8, ep=32, etp=1)
    assert str(whole) == "tp4,pp2,dp8,ep32,etp1"
    assert (whole.fold_size, whole.expert_replicas) == (4, 8)
    cut = Layout(tp=4, dp=8, ep=8, etp=4)
    assert (cut, cut.fold_size, cut.expert_replicas) == (Layout(tp=4, dp=8, ep=8), 1, 8)
    assert Layout(dp=8, ep=8, etp=1) == Layout(dp=8, ep=8)
    with pytest.raises(BadInput, match=r"layout etp=2 is neither 1 nor tp=4; use one of them\."):
        Layout(tp=4, dp=2, ep=2, etp=2)
    for ep in (2, 6, 64):
        with pytest.raises(BadInput, match=rf"layout ep={ep} with etp=1 is no multiple of tp=4 that divides the 32"):
            Layout(tp=4, dp=8, ep=ep, etp=1)


def test_whole_experts_divide_among_their_ranks() -> None:
    experts = Experts(num_experts=24, experts_per_token=2, ffn_size=1024)
    mixture = replace(llama(), name="mixtral", experts=experts)
    assert not layout_violations(Layout(tp=4, dp=2, ep=8, etp=1), mixture)
    assert layout_violations(Layout(tp=8, dp=2, ep=16, etp=1), mixture) == (
        "ep=16 does not divide the 24 experts of mixtral; use ep=8.",
    )
    assert layout_violations(Layout(tp=16, ep=16, etp=1), replace(mixture, num_kv_heads=16))[-1] == (
        "etp=1 needs whole experts, and the 24 of mixtral are no multiple of tp=16; use etp=16."
    )


@pytest.mark.parametrize("text", ["tp4,pp2,dp8,ep32,etp1", "tp2,dp4,ep2,etp1", "tp2,pp2,dp4,ep4", "dp8,ep4"])
def test_the_ranks_of_every_group_of_experts_hold_each_part_of_them_once(text: str) -> None:
    layout = Layout.parse(text)
    places = [layout.expert_coordinates(index) for index in range(layout.num_ranks)]
    assert len(set(places)) == layout.num_ranks
    held: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, place in enumerate(places):
        tp, _, dp, _ = layout.coordinates(index)
        held.setdefault((place.pp, place.edp), []).append((layout.ep_rank(tp, dp), place.etp))
    for parts in held.values():
        assert parts == [(ep, etp) for ep in range(layout.ep) for etp in range(layout.etp)]


def test_a_part_of_the_target_is_made_of_every_part_of_the_source_that_it_overlaps() -> None:
    """Two of three pipeline stages reach into each of two, and two of two into the second of three."""
    assert Layout(pp=4).max_overlapping_shards(Layout(pp=2)) == 2
    assert Layout(pp=2).max_overlapping_shards(Layout(pp=4)) == 1
    assert Layout(pp=3).max_overlapping_shards(Layout(pp=2)) == 2
    assert Layout(pp=2).max_overlapping_shards(Layout(pp=3)) == 2
    assert Layout(pp=5).max_overlapping_shards(Layout(pp=3)) == 3
    assert Layout(tp=8, pp=3).max_overlapping_shards(Layout(tp=2, pp=1)) == 12
    assert Layout(tp=4, dp=2, ep=2).max_overlapping_shards(Layout(dp=2, ep=2)) == 4
    assert Layout(tp=4, dp=2, ep=8, etp=1).max_overlapping_shards(Layout(dp=2, ep=2)) == 4
    assert Layout(tp=2, dp=2, ep=4, etp=1).max_overlapping_shards(Layout(tp=2, dp=2, ep=2)) == 2


def test_divisors_and_the_nearest_common_one() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert nearest_divisor(5, 12, 18) == 6
    assert nearest_divisor(7, 8, 24) == 8
    assert nearest_divisor(3, 4) == 2


@pytest.mark.parametrize(
    ("num_layers", "pp", "counts"),
    [
        (30, 1, (30,)),
        (30, 5, (6, 6, 6, 6, 6)),
        (30, 2, (15, 15)),
        (30, 4, (7, 8, 8, 7)),
        (30, 16, (1, *(2,) * 14, 1)),
        (126, 8, (15, 16, 16, 16, 16, 16, 16, 15)),  # Llama 3.1 405B
    ],
)
def test_a_pipeline_of_a_language_model_counts_embedding_and_head_as_layers_where_it_must(
    num_layers: int, pp: int, counts: tuple[int, ...]
) -> None:
    assert layers_per_stage(llama(num_hidden_layers=num_layers), pp) == counts


def test_a_scalar_head_does_not_count_as_a_layer() -> None:
    scorer = replace(llama(num_hidden_layers=7), scalar_head=True)
    assert layers_per_stage(scorer, 2) == (3, 4)
    assert layers_per_stage(scorer, 4) == (1, 2, 2, 2)


def test_any_other_pipeline_is_dealt_by_the_parameters_that_a_token_passes() -> None:
    """A head over 32,000 tokens is 0.7 layers of 4,096 x 11,008, one over 160,000 tokens 3.7."""
    assert layers_per_stage(llama(), 7) == (1, 5, 5, 5, 5, 5, 4)
    assert layers_per_stage(llama(vocab_size=160_000), 7) == (4, 5, 5, 5, 5, 5, 1)
    assert layers_per_stage(replace(llama(vocab_size=160_000), scalar_head=True), 4) == (7, 8, 8, 7)


def test_a_split_depends_on_the_shape_of_the_model_and_not_on_what_is_tied_or_trained() -> None:
    model = llama(vocab_size=160_000)
    for other in (replace(model, tied_embeddings=True, name="tied"), replace(model, qk_norm=True)):
        assert layers_per_stage(other, 7) == layers_per_stage(model, 7)


@pytest.mark.parametrize("scalar_head", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 30, 61, 126])
def test_every_pipeline_holds_every_layer_once_and_no_stage_is_empty(num_layers: int, scalar_head: bool) -> None:
    model = replace(llama(num_hidden_layers=num_layers), scalar_head=scalar_head)
    for pp in range(1, num_layers + 1):
        assert layout_violations(Layout(pp=pp), model) == ()
        held = [stage_layers(model, pp, stage) for stage in range(pp)]
        assert [number for layers in held for number in layers] == list(range(num_layers))
        assert tuple(map(len, held)) == layers_per_stage(model, pp)
        assert min(map(len, held)) >= 1


def test_there_are_no_more_stages_than_layers() -> None:
    with pytest.raises(BadInput, match="pp=31 is more than the 30 layers of llama; use pp=30 at most"):
        layers_per_stage(llama(), 31)


def test_a_legal_layout_breaks_no_rule() -> None:
    assert layout_violations(Layout(tp=8, pp=5, dp=7, sp=True), llama()) == ()


@pytest.mark.parametrize(
    ("layout", "model", "sentence"),
    [
        (Layout(tp=6), llama(), "tp=6 does not divide the 32 attention heads of llama; use tp=4."),
        (Layout(tp=16), llama(), "tp=16 does not divide the 8 KV heads of llama; use tp=8."),
        (
            Layout(tp=8),
            llama(intermediate_size=11012),
            "tp=8 does not divide the 11012 feed-forward columns of llama; use tp=4.",
        ),
        (Layout(pp=31), llama(), "pp=31 is more than the 30 layers of llama; use pp=30 at most."),
        (Layout(dp=8, ep=2), llama(), "ep=2 spreads experts, and llama has none; use ep=1."),
    ],
)
def test_each_broken_rule_is_one_sentence_with_a_way_out(layout: Layout, model: ModelSpec, sentence: str) -> None:
    assert layout_violations(layout, model) == (sentence,)


def test_layouts_that_cut_weights_alike_have_one_cut() -> None:
    layout = Layout.parse("tp2,pp2,dp3,cp4,sp")
    assert layout == Layout(tp=2, pp=2, dp=3, cp=4, sp=True)
    assert layout.weight_layout == Layout(tp=2, pp=2, dp=12)
    assert layout.weight_layout.num_ranks == layout.num_ranks


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (4, 2), (2, 8), (4, 8)])
def test_a_piece_of_a_stage_is_a_virtual_stage(pp: int, vpp: int) -> None:
    """Chunk k of stage s is virtual stage k x pp + s, and virtual stages follow one another through the model."""
    model = llama(num_hidden_layers=32)
    of_stages = [chunk_layers(model, pp, stage, vpp) for stage in range(pp)]
    virtual = [of_stages[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    assert [layer for layers in virtual for layer in layers] == list(range(32))
    assert {len(layers) for layers in virtual} == {32 // (pp * vpp)}


def test_pieces_are_of_as_many_layers_each() -> None:
    model = llama()
    assert layout_violations(Layout(pp=2, vpp=4), model) == (
        f"vpp=4 does not divide the 15 layers that {model.name} has on each of pp=2 stages; use vpp=3.",
    )
    assert layout_violations(Layout(pp=4, vpp=2), model) == (
        f"vpp=2 needs equal pipeline stages, and pp=4 does not divide the 30 layers of {model.name}; use vpp=1.",
    )
    with pytest.raises(BadInput, match="vpp with pp=1"):
        Layout(vpp=2)
