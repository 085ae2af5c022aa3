"""From logits to token ids: everything that chooses the next token of a row.

Order of processing of one row (masks, bias and penalties as vLLM orders them; the cuts as
transformers' and SGLang's samplers order them):

1. log probabilities, when asked for, come from the model's own logits, before all of the below;
2. logit bias, allowed ids, forbidden ids, and stop ids until ``min_tokens`` outputs exist;
3. penalties: repetition (prompt and output), then frequency and presence (output);
4. greedy rows end here: the highest logit, the lowest id on a tie;
5. the row's maximum is subtracted, the rest divided by the temperature;
6. top-k: the k best, the lowest ids first on a tie (so k = 1 is greedy);
7. top-p: the shortest run of the best whose share of what top-k left reaches p;
8. min-p: those at least min_p times as likely as the best;
9. the draw (Gumbel-max): the highest sum of scaled logit and a noise value that is a function of
   (seed, choice, position, token id) alone.

Since every kept token brings its own noise, a draw knows nothing of batch mates, row index, batch
size, preemption, or the order in which candidates were found. Sums over a row are exact integer
sums (:mod:`.rows`), so they have one value whatever the order of summation.
"""
