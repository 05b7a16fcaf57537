"""The record of which samples each committed step used."""
