"""Fakes shipped with the package: fake engine, certificate maker, in-memory TLS link. Imported by tests only."""
