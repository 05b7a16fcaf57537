"""The state kept at a step boundary: models, optimizers, registered objects, their names and history."""
