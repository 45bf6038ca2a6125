"""A critic whose values start at zero, as the torch engine's do: veRL's own head starts at random."""

from __future__ import annotations

from typing import Any


def start_at_zero() -> None:
    """Make what veRL loads as a value model say zero at first, in this process."""
    import verl.utils.model as models

    load = models.load_valuehead_model

    def load_with_zero_head(*arguments: Any, **settings: Any) -> Any:
        model = load(*arguments, **settings)
        for name, parameter in model.named_parameters():
            if name.startswith(("score.", "classifier.", "v_head.")):
                parameter.data.zero_()
        return model

    models.load_valuehead_model = load_with_zero_head
