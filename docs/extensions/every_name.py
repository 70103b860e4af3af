"""Every public name stands in the reference with a docstring that stands for itself, or the build fails."""

import importlib
import inspect

from sphinx.util import logging

log = logging.getLogger(__name__)

NOT_A_VERB = {
    "A",
    "All",
    "An",
    "As",
    "Back",
    "Every",
    "From",
    "How",
    "Of",
    "The",
    "Those",
    "What",
    "Where",
    "Who",
    "Within",
}


def faults(value):
    """Yield what is wrong with the docstring of a public class or function, and of the methods of a class."""
    doc = inspect.getdoc(value)
    if not doc:
        yield "has no docstring"
        return
    first = doc.split()[0]
    if inspect.isclass(value):
        if first == "Of":
            yield "has a docstring that begins with 'Of'"
        for name, method in vars(value).items():
            if not name.startswith("_") and inspect.isfunction(method) and method.__doc__:
                first = method.__doc__.split()[0]
                if first in NOT_A_VERB:
                    yield f"has a method {name} whose docstring begins with {first!r}, and not with a verb"
        return
    if first in NOT_A_VERB or not first[0].isupper():
        yield f"has a docstring that begins with {first!r}, and not with a verb"
    signature = inspect.signature(value)
    if signature.parameters and "Args:" not in doc:
        yield "takes arguments, and its docstring has no Args"
    silent = signature.return_annotation in (None, "None") or inspect.isgeneratorfunction(inspect.unwrap(value))
    if not silent and not any(word in doc for word in ("Returns:", "Returns the", "Yields")):
        yield "returns something, and its docstring has no Returns"


def check(app, env):
    described = {name for name, *_ in env.get_domain("py").get_objects()}
    modules = {name: importlib.import_module(name) for name in app.config.public_modules}
    seen = {
        id(getattr(space, name))
        for module, space in modules.items()
        for name in space.__all__
        if f"{module}.{name}" in described
    }
    for module, namespace in modules.items():
        for name in namespace.__all__:
            value = getattr(namespace, name)
            if inspect.ismodule(value) or name.startswith("__"):
                continue
            if id(value) not in seen:
                log.warning("%s.%s is public and not in the reference", module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                for fault in faults(value):
                    log.warning("%s.%s %s", module, name, fault)


def setup(app):
    app.add_config_value("public_modules", [], "env")
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
