"""Models by name: what megarl can make by itself, and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from megarl.config.paths import user_path
from megarl.errors import UserError

REWARD = "-reward"  # at the end of a tiny model's name: a random reward model of the family


def names() -> list[str]:
    """Every name that `resolve` knows."""
    from megarl.models.tiny import RECIPES

    return ["smollm2", *(f"tiny-{family}" for family in RECIPES), *(f"tiny-{family}{REWARD}" for family in RECIPES)]


def resolve(path_or_name: str | Path) -> Path:
    """The Hugging Face folder of a known name (made on first use, in the cache) or of a path, which is checked to be one.

    A known name wins over a folder of the same name in the working directory; write `./smollm2` for the folder.
    """
    if str(path_or_name) in names():
        return _made(str(path_or_name))
    return check_folder(user_path(path_or_name))


def described(path_or_name: str | Path) -> Path:
    """As `resolve`, of a folder of which no more than config.json is asked for."""
    if str(path_or_name) in names():
        return _made(str(path_or_name))
    return _with_config(user_path(path_or_name))


def _with_config(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"There is no model folder {folder}, nor a known model of that name ({', '.join(names())}).")
    if not (folder / "config.json").is_file():
        raise UserError(f"The model folder {folder} holds no config.json.")
    return folder


def check_folder(folder: Path) -> Path:
    """`folder`, if it holds what a run needs: config.json, a tokenizer, safetensors. Raises UserError."""
    _with_config(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"The model folder {folder} holds no tokenizer (tokenizer.json).")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "only pickled weights, which are not read because they can run code" if pickled else "no weights"
        raise UserError(f"The model folder {folder} holds {why}; *.safetensors are needed.")
    return folder


def _made(name: str) -> Path:
    from megarl.models import heads, tiny
    from megarl.models.cache import cache_dir, locked

    if name == "smollm2":
        from megarl.models import smollm2

        return smollm2.get()
    folder = cache_dir() / f"{name}-v{tiny.VERSION}"
    if not folder.is_dir():
        with locked(name):
            if not folder.is_dir():
                family = name.removeprefix("tiny-").removesuffix(REWARD)
                make = heads.make_tiny_reward if name.endswith(REWARD) else tiny.make_tiny
                make(family, folder)
    return folder
