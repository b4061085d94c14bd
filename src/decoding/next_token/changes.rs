//! The changes that constraints make of the logits of a position.

use super::constraints::Constraints;
use super::entries::Entries;
use super::history::History;
use crate::backend::distribution::TILE;
use crate::backend::parallel;

impl Constraints {
    /// Returns whether the result depends on the logits themselves, not only on their differences.
    pub(super) fn need_logits(&self) -> bool {
        self.repetition_penalty != 1.0 || self.processor.is_some() || self.logits_processor.is_some()
    }

    /// Returns the changed logits of the entries, or `None` if nothing changes. A logit before the changes is the sum
    /// of an id's log-probability and the `offset`. The `early` ids would end the text too early.
    pub(super) fn apply(
        &self,
        log_probs: &[f64],
        offset: f64,
        entries: Entries<'_>,
        history: &History,
        early: &[u32],
    ) -> Option<Vec<f64>> {
        let occurrences = history.occurrences(self.penalty_window.filter(|_| self.has_penalty()));
        // Ids outside the vocabulary have no logit.
        let penalised = || occurrences.iter().filter_map(|(&id, &n)| entries.entry(id).map(|entry| (entry, n)));
        let is_penalised = self.has_penalty() && penalised().next().is_some();
        let is_processed = self.processor.is_some() || self.logits_processor.is_some();
        let is_masked =
            self.allowed.is_some() || self.allowed_mask.is_some() || !(self.banned.is_empty() && early.is_empty());
        if self.bias.is_empty() && !is_penalised && !is_processed && !is_masked {
            return None;
        }
        let mut z: Vec<f64> = log_probs.iter().map(|log_p| log_p + offset).collect();
        for &(id, bias) in &self.bias {
            if let Some(entry) = entries.entry(id) {
                z[entry] += bias;
            }
        }
        for (entry, generated) in penalised().filter(|_| is_penalised) {
            let z = &mut z[entry];
            if self.repetition_penalty != 1.0 {
                *z = if *z > 0.0 { *z / self.repetition_penalty } else { *z * self.repetition_penalty };
            }
            if generated > 0 {
                *z -= self.frequency_penalty * f64::from(generated) + self.presence_penalty;
            }
        }
        if let Some(processor) = &self.processor {
            entries.change_all(&mut z, |z| {
                parallel::for_each(z.chunks_mut(TILE).enumerate(), |(tile, z)| (processor.0)((tile * TILE) as u32, z));
            });
        }
        self.mask(&mut z, entries, early);
        if let Some(processor) = &self.logits_processor {
            entries.change_all(&mut z, |z| (processor.0)(history.text(), z));
            self.mask(&mut z, entries, early);
        }
        Some(z)
    }

    /// Returns whether a penalty may change a logit.
    fn has_penalty(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// Makes the logits of ids that must not be drawn minus infinity.
    fn mask(&self, z: &mut [f64], entries: Entries<'_>, early: &[u32]) {
        if let Some(allowed) = &self.allowed {
            let allowed: Vec<_> = allowed.iter().filter_map(|&id| entries.entry(id)).map(|i| (i, z[i])).collect();
            z.fill(f64::NEG_INFINITY);
            allowed.into_iter().for_each(|(entry, allowed)| z[entry] = allowed);
        }
        if let Some(words) = &self.allowed_mask {
            entries.mask(z, words);
        }
        for entry in self.banned.iter().chain(early).filter_map(|&id| entries.entry(id)) {
            z[entry] = f64::NEG_INFINITY;
        }
    }
}
