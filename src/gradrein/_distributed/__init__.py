"""Primitives between ranks: collectives whose failure is an error of ours, agreement, meshes."""
