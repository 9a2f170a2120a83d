"""Checks of constructor arguments that the environments share."""


def at_least(minimum: int, **arguments: int) -> None:
    """Raises a ValueError that names the first argument that is no integer or below `minimum`."""
    for name, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name}={value!r} is wrong; use an integer of at least {minimum}.")


def true_or_false(**arguments: bool) -> None:
    """Raises a ValueError that names the first argument that is no bool."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is wrong; use True or False.")
