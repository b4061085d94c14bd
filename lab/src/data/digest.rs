//! FNV-1a with 64 bits. The digest stays the same from build to build; the standard library's hasher promises no such
//! thing.

/// The digest of what was added to it.
#[derive(Clone, Copy)]
pub struct Digest(u64);

/// The digest of nothing.
impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    fn bytes(self, bytes: &[u8]) -> Self {
        Self(bytes.iter().fold(self.0, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)))
    }

    /// Adds strings, each followed by a byte that no UTF-8 string has.
    pub fn texts<S: AsRef<str>>(self, texts: impl IntoIterator<Item = S>) -> Self {
        texts.into_iter().fold(self, |digest, text| digest.bytes(text.as_ref().as_bytes()).bytes(&[0xff]))
    }

    /// Adds a list of token ids, with its length.
    pub fn ids(self, ids: &[u32]) -> Self {
        let digest = self.bytes(&(ids.len() as u64).to_le_bytes());
        ids.iter().fold(digest, |digest, id| digest.bytes(&id.to_le_bytes()))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of the authors' test vectors (draft-eastlake-fnv, appendix C).
    #[test]
    fn digests_equal_the_published_ones() {
        for (text, expected) in [("", "cbf29ce484222325"), ("a", "af63dc4c8601ec8c"), ("foobar", "85944171f73967e8")] {
            assert_eq!(Digest::default().bytes(text.as_bytes()).to_string(), expected);
        }
    }

    #[test]
    fn the_boundaries_of_texts_and_lists_count() {
        let texts = |texts: &[&str]| Digest::default().texts(texts).to_string();
        assert_ne!(texts(&["ab", "c"]), texts(&["a", "bc"]));
        let ids = |a: &[u32], b: &[u32]| Digest::default().ids(a).ids(b).to_string();
        assert_ne!(ids(&[1, 2], &[3]), ids(&[1], &[2, 3]));
    }
}
