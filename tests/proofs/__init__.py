"""What shows that nothing is lost and nobody is let in: long runs with figures, each with a short form among the tests.

`scripts/prove` lists the parts and runs them. A part is a module here with a `Part`; its short form is the test module
that imports it, so that both run the same code.
"""
