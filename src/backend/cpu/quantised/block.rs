//! The weights of one block, in plain code.

use half::f16;

use super::kind::BlockType;

/// Writes the weights of a block.
pub(super) fn dequantise(kind: BlockType, block: &[u8], to: &mut [f32]) {
    match kind {
        BlockType::Q8_0 => q8_0(block, to),
        BlockType::Q4_0 => q4_0(block, to),
        BlockType::Q6K => q6_k(block, to),
        BlockType::Q4K => q4_k(block, &block[16..144], None, to),
        BlockType::Q5K => q4_k(block, &block[48..176], Some(&block[16..48]), to),
    }
}

/// Reads a number in half precision.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q8_0(block: &[u8], to: &mut [f32]) {
    let d = half(block, 0);
    for (to, &q) in to.iter_mut().zip(&block[2..]) {
        *to = f32::from(q as i8) * d;
    }
}

fn q4_0(block: &[u8], to: &mut [f32]) {
    let d = half(block, 0);
    let (low, high) = to.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = (f32::from(byte & 15) - 8.0) * d;
        *high = (f32::from(byte >> 4) - 8.0) * d;
    }
}

/// Q4_K, and Q5_K with the `fifth` bits of its numbers.
fn q4_k(block: &[u8], nibbles: &[u8], fifth: Option<&[u8]>, to: &mut [f32]) {
    let (d, least) = (half(block, 0), half(block, 2));
    for (group, to) in to.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = group_scales(&block[4..16], group);
        let (scale, offset) = (d * f32::from(scale), least * f32::from(offset));
        let nibbles = &nibbles[group / 2 * 32..][..32];
        for (l, (to, &byte)) in to.iter_mut().zip(nibbles).enumerate() {
            let low = byte >> (group % 2 * 4) & 15;
            let q = low | fifth.map_or(0, |fifth| (fifth[l] >> group & 1) << 4);
            *to = scale * f32::from(q) - offset;
        }
    }
}

/// Returns the scale and the offset of a group of 32 weights, 6 bits each of 12 bytes.
fn group_scales(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let both = packed[group + 4];
        (both & 15 | packed[group - 4] >> 6 << 4, both >> 4 | packed[group] >> 6 << 4)
    }
}

fn q6_k(block: &[u8], to: &mut [f32]) {
    let d = half(block, 208);
    for (part, to) in to.chunks_exact_mut(128).enumerate() {
        let (low, high, scales) = (&block[64 * part..], &block[128 + 32 * part..], &block[192 + 8 * part..]);
        for (i, to) in to.iter_mut().enumerate() {
            let (quarter, l) = (i / 32, i % 32);
            let nibble = low[quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
            let q = nibble | (high[l] >> (2 * quarter) & 3) << 4;
            *to = d * f32::from(scales[i / 16] as i8) * (f32::from(q) - 32.0);
        }
    }
}
