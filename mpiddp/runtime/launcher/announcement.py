"""Moved to `mpiddp.runtime.reports`."""

from mpiddp.runtime.reports import Announced as Announced
from mpiddp.runtime.reports import announce as announce
from mpiddp.runtime.reports import announced as announced
