"""The exchange of weights: decentralized averages, in a step or in the background."""
