"""A name in backticks in a docstring is there: in the file, in a module of that name, or in another project."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.modules import PACKAGES, Module, all_modules, modules

QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\([^`]*\))?`(?!`)")
_OF_OTHERS = (
    # keys of jobs, of traces and of other trainers
    "actor_generate actor_train batch_size workload data job usage completion_tokens truncation max_num_seqs "
    "gpu_memory_utilization missing_eos_penalty masked_whiten meshwright_group_name "
    # Megatron-core, torch, datasets, SVG, the shell
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split get_pp_rank_microbatches "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage get_transformer_layer_offset "
    "RankGenerator DistributedOptimizer MoEAlltoAllTokenDispatcher grad_reduce_in_fp32 tie_weights "
    "torch megatron transformers datasets add_scalar text_anchor time if for while a dp yaml"
)
"""Names of what is not this project's, or of no code."""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_a_docstring_quotes_is_there(package: str) -> None:
    missing = [
        f"{module}: {name}"
        for module in modules(package)
        for name in quoted(module.tree)
        if not all(is_known(part, module) for part in name.split(".") if part)
    ]
    assert missing == []


def quoted(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from QUOTED.findall(node.value.value)


def is_known(name: str, module: Module) -> bool:
    return name in everywhere() or name in names(module)


@cache
def names(module: Module) -> frozenset[str]:
    """What a file defines, takes, imports or has in short texts such as keys."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found |= set(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            found |= set(re.findall(r"\w+", node.value)) if not node.value.startswith(("`", " ")) else set()
    return frozenset(found)


@cache
def everywhere() -> frozenset[str]:
    """Modules and folders, what stands at the top of a module, methods, and what belongs to others."""
    found = {*dir(builtins), *_OF_OTHERS.split(), "py", "meshwright"}
    for module in all_modules():
        found |= {*module.path.with_suffix("").parts}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
        for node in module.tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return frozenset(found)
