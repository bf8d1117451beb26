"""On the module path of any command, makes its process a host of a pretended slice: the stock `trl` command starts another."""

import join_slice  # noqa: F401
