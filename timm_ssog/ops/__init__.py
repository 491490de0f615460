"""Mixing operators: the definition, the fast paths and the dispatcher that picks one."""
