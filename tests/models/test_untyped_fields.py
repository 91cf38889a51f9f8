"""A field of one's own RunConfig without a type is no field: it is refused, not passed over."""

import pytest

import recjax
from recjax.config.run import RunConfig
from recjax.errors import ConfigError
from recjax.models.dcnv2 import DCNv2Config


def test_a_class_with_a_value_without_a_type_is_refused():
    with pytest.raises(ConfigError, match=r"Mine\.model has no type, .* model: DCNv2Config = DCNv2Config\(\.\.\.\)"):

        class Mine(RunConfig):
            model = DCNv2Config()


def test_so_is_a_preset(tmp_path):
    (tmp_path / "p.py").write_text(
        "import dataclasses\nfrom recjax.config.run import RunConfig\nfrom recjax.models.dcnv2 import DCNv2Config\n\n\n"
        "@dataclasses.dataclass(frozen=True)\nclass Mine(RunConfig):\n    model = DCNv2Config()\n\n\nconfig = Mine()\n"
    )
    with pytest.raises(ConfigError, match=r"p\.py.*Mine\.model has no type"):
        recjax.load(str(tmp_path / "p.py"))
