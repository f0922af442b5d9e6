"""Questions with known answers over real text, and what it takes to ask, score, log and report them."""
