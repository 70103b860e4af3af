"""Every public name stands in the reference with a docstring of its own, or the build fails."""

import importlib
import inspect

from sphinx.util import logging

log = logging.getLogger(__name__)


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
            if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
                log.warning("%s.%s has no docstring", module, name)


def setup(app):
    app.add_config_value("public_modules", [], "env")
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
