"""Keys of a configuration above the defaults, with references followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers.config_keys import TrainerConfig, known_keys, read_changes, read_flags, read_overrides
from meshwright.profiles.errors import BadInput

VERL, NEMO = known_keys("verl"), known_keys("nemo_rl")
A = "actor_rollout_ref"


def test_what_is_given_is_above_the_default_and_references_lead_there() -> None:
    given = TrainerConfig(known=VERL, values={f"{A}.actor.use_dynamic_bsz": True, "trainer.n_gpus_per_node": 4})
    assert given.value(f"{A}.rollout.log_prob_use_dynamic_bsz") is True
    assert given.integer(f"{A}.rollout.n_gpus_per_node") == 4
    assert given.value("critic.forward_max_token_len_per_gpu") == 32768
    assert given.value("critic.ppo_mini_batch_size") == 256
    assert not given.has("critic.ppo_mini_batch_size")


def test_products_of_references_are_computed() -> None:
    given = TrainerConfig(known=NEMO, values={"policy.max_total_sequence_length": 100})
    assert given.value("policy.sequence_packing.train_mb_tokens") == 400


def test_a_key_that_is_no_number_is_named() -> None:
    given = TrainerConfig(known=VERL, values={"trainer.nnodes": "$NODES", "algorithm.gamma": "high"})
    with pytest.raises(BadInput, match=r"trainer.nnodes='\$NODES' is not a whole number"):
        given.integer("trainer.nnodes")
    with pytest.raises(BadInput, match=r"algorithm.gamma='high' is not a number"):
        given.number("algorithm.gamma")
    assert TrainerConfig(known=VERL, values={"trainer.nnodes": 2.0}).integer("trainer.nnodes") == 2


def test_overrides_and_flags_are_read_from_scripts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=2 +a.b=1e-6 model_engine=megatron FOO=1\n")
    given = read_overrides(script, VERL)
    assert dict(given.values) == {"trainer.nnodes": 2, "a.b": 1e-6, "model_engine": "megatron"}
    assert given.unknown == ("a.b",)
    script.write_text("python3 train.py --colocate --lr 1e-6 --rollout-batch-size=8 --betas 0.9 0.95\n")
    flags = read_flags(script, known_keys("slime")).values
    assert (flags["colocate"], flags["lr"], flags["rollout-batch-size"], flags["betas"]) == (True, 1e-6, 8, [0.9, 0.95])


def test_a_yaml_file_stands_over_those_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("policy: {train_micro_batch_size: 2, precision: bfloat16}\n")
    (tmp_path / "run.yaml").write_text("defaults: base.yaml\npolicy: {train_micro_batch_size: 8}\n")
    given = read_overrides(tmp_path / "run.yaml", NEMO)
    assert dict(given.values) == {"policy.train_micro_batch_size": 8, "policy.precision": "bfloat16"}


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.sh", "echo hello\n"), ("run.yaml", "- 1\n"), ("run.yaml", "policy: {precision: bfloat16}\n")],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match="configuration"):
        read_overrides(tmp_path / name, VERL)


def test_what_a_branch_decides_is_told_once_it_is_asked_for_and_what_nobody_asks_for_is_unread(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("N=1\nif [ -f big ]; then\nN=8\nfi\nmain_ppo trainer.nnodes=$N trainer.total_epochs=$N\n")
    given = read_overrides(script, VERL)
    branch = "whether [ -f big ] is not known from the script: each branch was followed."
    assert list(given.notes) == [branch]
    assert given.integer("trainer.nnodes") == 8
    assert list(given.notes) == [branch, "trainer.nnodes=8 is read, and in another branch of the script it is 1."]
    assert given.unread == ("trainer.total_epochs",)


def test_flags_of_a_launcher_are_none_of_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("ray start --head\nray job submit --address=a -- python3 train.py --colocate\n")
    assert read_flags(script, known_keys("slime")).values == {"colocate": True}


def test_a_file_that_a_configuration_goes_on_from_is_read_or_named(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("policy: {train_micro_batch_size: 4, logprob_batch_size: 4}\n")
    path = tmp_path / "config.yaml"
    path.write_text("defaults: [base.yaml, other.yaml]\npolicy: {logprob_batch_size: 8}\n")
    given = read_overrides(path, NEMO)
    assert (given.integer("policy.train_micro_batch_size"), given.integer("policy.logprob_batch_size")) == (4, 8)
    assert given.missing == ("other.yaml",)


def test_words_that_yaml_stumbles_over_are_texts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for word in ("2020-13-01", "[" * 3000, "9" * 6000, "0b_"):
        script.write_text(f"python3 train.py --lr '{word}' --rollout-batch-size 8\n")
        assert read_flags(script, known_keys("slime")).value("lr") == word


def test_files_that_name_each_other_are_read_so_often_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [a.yaml, a.yaml]\n")
    with pytest.raises(BadInput, match="builds on more than 32 files; write it as one"):
        read_overrides(tmp_path / "a.yaml", NEMO)
    (tmp_path / "b.yaml").write_text("defaults: 5\npolicy: {precision: bfloat16}\n")
    assert read_overrides(tmp_path / "b.yaml", NEMO).missing == ("5",)


def test_a_whole_number_that_is_left_out_has_another_and_a_list_is_told() -> None:
    given = TrainerConfig(known=NEMO, values={"a": 0, "b": [1], "c": 3})
    assert [given.integer_or(key, 7) for key in ("a", "none", "c")] == [7, 7, 3]
    with pytest.raises(BadInput, match=r"b=\[1\] is not a whole number"):
        given.integer_or("b", 7)


def test_a_value_that_the_script_does_not_say_is_no_default(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "N=$(nproc)\nmain_ppo trainer.nnodes=$N data.train_batch_size=${B} actor_rollout_ref.model.path=$HOME/m\n"
    )
    given = read_overrides(script, VERL)
    with pytest.raises(
        BadInput, match=r"trainer.nnodes=.*\$\(nproc\) is the output of a command.*--set trainer.nnodes=VALUE"
    ):
        given.integer("trainer.nnodes")
    with pytest.raises(BadInput, match=r"data.train_batch_size=\$\{B\}: B is set by no line"):
        given.value("data.train_batch_size")
    assert given.text("actor_rollout_ref.model.path") == "$HOME/m"
    changed = read_overrides(script, VERL, read_changes(["trainer.nnodes=4", "--data.train_batch_size=1E2"]))
    assert (changed.integer("trainer.nnodes"), changed.integer("data.train_batch_size")) == (4, 100)


@pytest.mark.parametrize("text", ["trainer.nnodes", "=4", ""])
def test_a_change_has_a_key_and_a_value(text: str) -> None:
    with pytest.raises(BadInput, match="KEY=VALUE"):
        read_changes([text])


def test_only_the_trainers_command_gives_keys(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "# python3 train_async.py --colocate\necho --n-samples-per-prompt 77\n"
        "A=(--lr 1E-6)\nA+=(--rollout-batch-size 8)\n"
        "python3 train.py ${A[@]} --actor-num-nodes 1 --colocate ${MORE[@]}\n"
        "python3 convert.py --lr 3\n"
    )
    given = read_flags(script, known_keys("slime"))
    assert dict(given.values) == {"lr": 1e-6, "rollout-batch-size": 8, "actor-num-nodes": 1, "colocate": True}
    assert given.value("colocate") is True
    assert "train.py" in given.command
    assert any("MORE is set by no line" in note for note in given.notes)
    assert any("several commands" in note for note in given.notes)


def test_the_value_of_a_flag_gives_no_more_keys(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 train.py --colocate --wandb-key ${KEY} --hf-checkpoint ${BASE}/model --rollout-batch-size 8 $MORE\n"
    )
    given = read_flags(script, known_keys("slime"))
    assert [note.partition(" ")[0] for note in given.notes if "may give more keys" in note] == ["$MORE"]


def test_references_lead_up_by_their_dots() -> None:
    given = TrainerConfig(known=NEMO, values={"a.b": 2, "a.c.d": "${..b}", "a.c.e": "${mul:${mul:${.d}, 3}, ${a.b}}"})
    assert (given.value("a.c.d"), given.value("a.c.e")) == (2, 12)


@pytest.mark.parametrize(
    ("text", "value"), [("1E-6", 1e-6), ("1e6", 1e6), (".5e3", 500.0), ("1:20", "1:20"), ("2024-01-01", "2024-01-01")]
)
def test_a_word_is_the_value_that_the_trainer_would_read(text: str, value: object) -> None:
    assert read_changes([f"a={text}"]) == {"a": value}


def test_keys_after_a_comment_in_a_command_reach_no_trainer_and_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo trainer.nnodes=2 \\\n    # four nodes\n"
        "    actor_rollout_ref.rollout.n=4 \\\n    data.train_batch_size=8 trainer.total_epochs=1\n"
    )
    given = read_overrides(script, VERL)
    assert dict(given.values) == {"trainer.nnodes": 2}
    assert [note.partition(" ")[0] for note in given.notes] == ["actor_rollout_ref.rollout.n=4"]
    script.write_text("python3 train.py --colocate \\\n  # none\n  --rollout-batch-size 8\n")
    flags = read_flags(script, known_keys("slime"))
    assert dict(flags.values) == {"colocate": True}
    assert any(note.startswith("--rollout-batch-size begins a command of its own") for note in flags.notes)


def test_a_json_object_gives_the_keys_below_its_own(tmp_path: Path) -> None:
    script, sky = tmp_path / "run.sh", known_keys("skyrl")
    below = "trainer.policy.megatron_config.transformer_config_kwargs"
    script.write_text(f'run -m skyrl {below}=\'{{"recompute_granularity": "selective", "a": {{"b": 1}}}}\'\n')
    assert dict(read_overrides(script, sky).values) == {
        f"{below}.recompute_granularity": "selective",
        f"{below}.a.b": 1,
    }
    script.write_text("run -m skyrl trainer.run_name='{no JSON}' trainer.logger='[1]'\n")
    assert dict(read_overrides(script, sky).values) == {"trainer.run_name": "{no JSON}", "trainer.logger": "[1]"}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.nnode", "trainer.nnodes"),
        ("actor_rollout_ref.actr.use_kl_loss", "actor_rollout_ref.actor.use_kl_loss"),
        ("actor_rollout_ref.rollout.enable_sleep_mode", None),
        ("actor_rollout_ref.actor.policy_loss.cppo_w_min", None),
    ],
)
def test_a_key_is_suggested_if_its_words_are_spelt_nearly_alike(key: str, meant: str | None) -> None:
    told, _ = TrainerConfig(known=VERL, values={key: 7}).split_unread("verl")
    assert told[f"{key}=7"] == "it is not a key of verl 0.9.1" + (f"; did you mean {meant!r}?" if meant else "")
