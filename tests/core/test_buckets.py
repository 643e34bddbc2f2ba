import pytest

from jaxpaged.core.buckets import MAX_FORWARD_BUCKETS, MAX_PROMPT_LOGPROB_ROWS, Bucket, Buckets


def test_sizes_on_a_gpu() -> None:
    buckets = Buckets(256, 8192, "gpu")
    decode = [bucket.num_seqs for bucket in buckets.forward if bucket.decode_only]
    assert decode == [8, 16, 32, 64, 96, 128, 192, 256]
    mixed = [(b.num_tokens, b.num_seqs) for b in buckets.forward if not b.decode_only]
    assert mixed[0] == (32, 32) and mixed[-1] == (8192, 256) and len(mixed) == 9
    assert buckets.rows == (8, 32, 128, 256)
    assert buckets.scoring_rows == (8, 64, 256, 256 + MAX_PROMPT_LOGPROB_ROWS)


def test_sizes_on_a_cpu() -> None:
    buckets = Buckets(6, 100, "cpu")
    decode = [bucket.num_tokens for bucket in buckets.forward if bucket.decode_only]
    assert decode == [1, 2, 4, 6]
    mixed = [(b.num_tokens, b.num_seqs) for b in buckets.forward if not b.decode_only]
    assert mixed == [(32, 6), (64, 6), (100, 6)]


def test_sizes_where_a_cpu_is_to_add_up_alike() -> None:
    """No step of less than 64 rows, whatever the limits; a GPU keeps its own sizes."""
    sizes = [(b.num_tokens, b.num_seqs, b.decode_only) for b in Buckets(6, 16, "cpu", True).forward]
    assert sizes == [(64, 64, True), (64, 6, False)]
    sizes = [(b.num_tokens, b.num_seqs) for b in Buckets(100, 200, "cpu", steady=True).forward]
    assert sizes == [(64, 64), (100, 100), (64, 64), (128, 100), (200, 100)]
    assert Buckets(6, 100, "gpu", steady=True).forward == Buckets(6, 100, "gpu").forward


def test_a_decode_bucket_differs_from_a_mixed_one_of_the_same_sizes() -> None:
    buckets = Buckets(256, 8192, "gpu")
    decode = buckets.fit(32, 32, decode_only=True)
    mixed = buckets.fit(32, 31, decode_only=False)
    assert decode == Bucket(32, 32, True) != mixed == Bucket(32, 32, False)
    assert len({str(bucket) for bucket in buckets.forward}) == len(buckets.forward)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64, 256, 1024, 4096])
@pytest.mark.parametrize("max_tokens", [1, 10, 2048, 8192, 10_000, 65_536, 1 << 20])
def test_every_step_within_the_limits_has_a_bucket(
    platform: str, max_num_seqs: int, max_tokens: int
) -> None:
    buckets = Buckets(max_num_seqs, max_tokens, platform)
    assert len(set(buckets.forward)) == len(buckets.forward) <= MAX_FORWARD_BUCKETS
    most = min(max_num_seqs, max_tokens)
    for num_seqs in {1, 2, most // 2 + 1, most} & set(range(most + 1)):
        decode = buckets.fit(num_seqs, num_seqs, decode_only=True)
        assert decode.decode_only and decode.num_tokens == decode.num_seqs >= num_seqs
        for num_tokens in {num_seqs, max_tokens // 3 + 1, max_tokens}:
            if num_seqs <= num_tokens <= max_tokens:
                mixed = buckets.fit(num_tokens, num_seqs, decode_only=False)
                assert not mixed.decode_only
                assert mixed.num_tokens >= num_tokens and mixed.num_seqs >= num_seqs
        assert buckets.fit_rows(num_seqs, scoring=False) >= num_seqs
    most_rows = max_num_seqs + MAX_PROMPT_LOGPROB_ROWS
    assert buckets.fit_rows(most_rows, scoring=True) == most_rows


def test_a_step_beyond_the_limits_has_none() -> None:
    buckets = Buckets(8, 64, "cpu")
    with pytest.raises(ValueError, match="65 tokens of 3 sequences"):
        buckets.fit(65, 3, decode_only=False)
    with pytest.raises(ValueError, match="9 tokens of 9 sequences"):
        buckets.fit(9, 9, decode_only=True)
    with pytest.raises(ValueError, match="9 rows"):
        buckets.fit_rows(9, scoring=False)
    with pytest.raises(ValueError, match="265 rows"):
        buckets.fit_rows(265, scoring=True)
