"""Where images come from: one file per data source, registered by name; a plugin adds its own with `data_source`."""

from vitruvius.data.sources._base import (
    AnySet,
    Size,
    check_num_classes,
    data_source,
    data_sources,
    describe_sources,
    existing_folder,
    is_stream,
    open_data,
)

__all__ = [
    "AnySet",
    "Size",
    "check_num_classes",
    "data_source",
    "data_sources",
    "describe_sources",
    "existing_folder",
    "is_stream",
    "open_data",
]
