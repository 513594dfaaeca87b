"""Moved to `mpiddp.runtime.join`."""

from mpiddp.runtime.join import join as join
