//! The text of a request, as far as its penalties, its processor and its noise depend on it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};

/// The token ids of a prompt and those that were generated after it.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    /// The prompt, and then what was generated.
    text: Vec<u32>,
    /// The number of ids that were generated.
    generated: usize,
    occurrences: Occurrences,
}

/// For each id of a text, how often it was generated: zero times if it is in the prompt alone.
pub(super) type Occurrences = HashMap<u32, u32>;

impl History {
    /// Adds ids at the end of the prompt.
    pub(super) fn add_to_prompt(&mut self, ids: &[u32]) {
        let end = self.text.len() - self.generated;
        self.text.splice(end..end, ids.iter().copied());
        ids.iter().for_each(|&id| _ = self.occurrences.entry(id).or_default());
    }

    /// Adds a generated id.
    pub(super) fn add_generated(&mut self, id: u32) {
        self.text.push(id);
        self.generated += 1;
        *self.occurrences.entry(id).or_default() += 1;
    }

    /// Returns the ids of the prompt, and then those that were generated.
    pub(super) fn text(&self) -> &[u32] {
        &self.text
    }

    /// Returns the number of ids that were generated.
    pub(super) fn generated(&self) -> usize {
        self.generated
    }

    /// Returns the last id, if it was generated.
    pub(super) fn last_generated(&self) -> Option<u32> {
        self.text.last().copied().filter(|_| self.generated > 0)
    }

    /// Returns the ids among the last `window` of the text, or in all of it.
    pub(super) fn occurrences(&self, window: Option<usize>) -> Cow<'_, Occurrences> {
        let len = self.text.len();
        let first = match window {
            Some(window) if window < len => len - window,
            _ => return Cow::Borrowed(&self.occurrences),
        };
        let mut occurrences = Occurrences::new();
        for (place, &id) in self.text.iter().enumerate().skip(first) {
            *occurrences.entry(id).or_default() += u32::from(place >= len - self.generated);
        }
        Cow::Owned(occurrences)
    }

    /// Hashes the text, so that ranks can compare theirs.
    pub(super) fn hash(&self, state: &mut impl Hasher) {
        (&self.text, self.generated).hash(state);
    }
}
