"""How the built-in demo model is made: text, tokenizer, network, training and export."""
