"""The tests of tokcap; a package, so that `tests.recordings` can be used by the demo too."""
