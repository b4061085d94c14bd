//! Bytes of a block.

/// Returns the bytes from `first` on.
#[inline(always)]
pub(super) fn at<const N: usize>(block: &[u8], first: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[first..first + N]);
    bytes
}

/// Unpacks the eight scales, then the eight offsets, of six bits each, that Q4_K and Q5_K have.
#[inline(always)]
pub(super) fn unpacked_scales(packed: [u8; 12]) -> [u64; 2] {
    let word = |i: usize| u32::from_le_bytes([packed[i], packed[i + 1], packed[i + 2], packed[i + 3]]);
    let (scales, offsets, rest) = (word(0), word(4), word(8));
    let high = |word: u32| word >> 2 & 0x3030_3030;
    let join = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le();
    [
        join(scales & 0x3f3f_3f3f, rest & 0x0f0f_0f0f | high(scales)),
        join(offsets & 0x3f3f_3f3f, rest >> 4 & 0x0f0f_0f0f | high(offsets)),
    ]
}
