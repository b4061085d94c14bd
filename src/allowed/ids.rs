//! The sets of allowed ids, and the restriction that they are at the positions of a mixture.

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::tensors::checks::{check_mask, check_vocab};
use crate::tensors::id_lists::{has_bit, sorted_unique, IdLists, Restriction};

/// The token ids that are allowed at each position: one set for all positions, such as a grammar's, or a list for each
/// position, such as the ids that a sampler's truncation left. [`Mixture::restricted`](crate::Mixture::restricted) and
/// [`Restricted`](crate::sets::Restricted) renormalise the distribution over them:
///
/// ```text
/// P(v | S) = P(v) / P(S) for v in S, else 0
/// ```
///
/// An id that is given twice counts once. The restriction comes after scale and function of the logits.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor};
/// use mos_head::sets::AllowedIds;
/// use mos_head::{Distributions, Error, LossOptions, Mixture};
///
/// # fn main() -> mos_head::Result<()> {
/// let contexts = Tensor::randn(0f32, 1., (3, 1, 8), &Device::Cpu)?; // 3 positions, K = 1, d = 8
/// let weight = Tensor::randn(0f32, 1., (100, 8), &Device::Cpu)?; // 100 token ids
/// let mixture = Mixture::new(&contexts, None, &weight, None)?;
/// let targets = Tensor::new(&[7u32, 50, 3], &Device::Cpu)?;
///
/// // The lists [3, 5, 7], [50] and [1, 2], one after another.
/// let allowed = AllowedIds::per_position(&[3, 5, 7, 50, 1, 2], &[0, 3, 4, 6])?;
/// let error = mixture.restricted(&allowed)?.loss(&targets, &LossOptions::default()).unwrap_err();
/// assert!(matches!(error, Error::NotAllowed { position: 2, got: 3 }));
///
/// let allowed = allowed.with_targets_added(true); // the last set becomes [1, 2, 3]
/// let loss = mixture.restricted(&allowed)?.loss(&targets, &LossOptions::default())?;
/// assert_eq!(loss.nll.to_vec1::<f32>()?[1], 0.0); // the only allowed id has probability one
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AllowedIds {
    sets: Sets,
    targets_added: bool,
    empty_as_full: bool,
}

/// The sets, as they were given.
#[derive(Clone, Debug)]
enum Sets {
    /// The same ids at all positions, in ascending order without repeats.
    Shared { ids: Vec<u32>, given_as: GivenAs },
    /// A list of ids for each position.
    Each(IdLists),
}

/// What a set was given as, with the vocabulary's size where that says it.
#[derive(Clone, Copy, Debug)]
enum GivenAs {
    Ids,
    Mask(usize),
    Words(usize),
}

impl AllowedIds {
    /// Allows the same ids at all positions.
    pub fn new(token_ids: &[u32]) -> Self {
        Self::from_sets(Sets::Shared { ids: sorted_unique(token_ids.to_vec()), given_as: GivenAs::Ids })
    }

    /// Allows the ids whose entry of a mask is not zero, at all positions.
    ///
    /// # Shapes
    ///
    /// - mask: `[vocab]`, u8
    ///
    /// # Errors
    ///
    /// If the mask is not a vector of u8. Its length is compared with the vocabulary where it is used.
    pub fn from_mask(mask: &Tensor) -> Result<Self> {
        if mask.rank() != 1 {
            return Err(Error::shape("mask", "[vocab]", mask.dims()));
        }
        if mask.dtype() != DType::U8 {
            return Err(Error::DType { argument: "mask", expected: "u8".into(), got: mask.dtype() });
        }
        check_vocab(mask.elem_count())?;
        let mask = mask.to_device(&Device::Cpu)?.to_vec1::<u8>()?;
        let ids = (0u32..).zip(&mask).filter(|(_, &is_allowed)| is_allowed != 0).map(|(id, _)| id);
        Ok(Self::from_sets(Sets::Shared { ids: ids.collect(), given_as: GivenAs::Mask(mask.len()) }))
    }

    /// Allows the ids of a mask at all positions, as grammar libraries have it: id i is allowed if bit `i % 32` of word
    /// `i / 32` is set. Bits beyond the vocabulary are ignored.
    ///
    /// # Errors
    ///
    /// If there are not `vocab_size / 32` words, rounded up, or the vocabulary is empty or too large.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use mos_head::sets::{AllowedIds, Restricted};
    /// use mos_head::{OutputLayer, SoftmaxHead};
    ///
    /// # fn main() -> mos_head::Result<()> {
    /// let head = SoftmaxHead::from_tensors(Tensor::new(&[[4f32], [3.], [2.], [1.]], &Device::Cpu)?, None)?;
    /// let restricted = Restricted::new(&head, AllowedIds::from_words(&[0b1100], 4)?)?; // ids 2 and 3
    /// let hidden = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
    /// assert_eq!(restricted.argmax(&hidden)?.to_vec1::<u32>()?, [2]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_words(words: &[u32], vocab_size: usize) -> Result<Self> {
        check_vocab(vocab_size)?;
        check_mask("words", words, vocab_size)?;
        let ids = (0..vocab_size as u32).filter(|&id| has_bit(words, id)).collect();
        Ok(Self::from_sets(Sets::Shared { ids, given_as: GivenAs::Words(vocab_size) }))
    }

    /// Allows the ids of a list for each position, in the order of the flattened leading dimensions, as compressed
    /// sparse rows: position i has `token_ids[offsets[i]..offsets[i + 1]]`.
    ///
    /// # Errors
    ///
    /// If the offsets do not ascend from 0 to the number of ids.
    pub fn per_position(token_ids: &[u32], offsets: &[usize]) -> Result<Self> {
        let expected = || format!("numbers that ascend from 0 to {}, the number of token ids", token_ids.len());
        let invalid = |got: &str| Error::config("offsets", expected(), got);
        match offsets {
            [0, .., last] | [last @ 0] if *last == token_ids.len() => {}
            [] => return Err(invalid("none")),
            [first, ..] if *first != 0 => return Err(invalid(&format!("{first} first"))),
            [.., last] => return Err(invalid(&format!("{last} last"))),
        }
        if let Some(index) = (1..offsets.len()).find(|&index| offsets[index - 1] > offsets[index]) {
            return Err(invalid(&format!("{} after {} at index {index}", offsets[index], offsets[index - 1])));
        }
        let lists = offsets.windows(2).map(|pair| token_ids[pair[0]..pair[1]].to_vec());
        Ok(Self::from_sets(Sets::Each(IdLists::new(lists))))
    }

    /// Makes the allowed ids with the default options.
    fn from_sets(sets: Sets) -> Self {
        AllowedIds { sets, targets_added: false, empty_as_full: false }
    }

    /// Sets whether the target of a loss, or an id that is scored, is added to the set of its position if it is not in
    /// it: where sets are computed anew, rounding may leave out an id that was sampled. The default is false: such an
    /// id is [`Error::NotAllowed`].
    pub fn with_targets_added(self, targets_added: bool) -> Self {
        AllowedIds { targets_added, ..self }
    }

    /// Sets whether an empty set allows all ids. The default is false: an empty set is [`Error::EmptySet`].
    pub fn with_empty_as_full(self, empty_as_full: bool) -> Self {
        AllowedIds { empty_as_full, ..self }
    }

    /// Whether all positions have the same set, and no target may be added to it.
    pub(super) fn are_shared(&self) -> bool {
        matches!(self.sets, Sets::Shared { .. }) && !self.targets_added
    }

    /// Returns an error if an id is not in the vocabulary.
    pub(super) fn check_vocab(&self, vocab: usize) -> Result<()> {
        let is_outside = |id: &&u32| **id as usize >= vocab;
        let outside = match &self.sets {
            &Sets::Shared { given_as: GivenAs::Mask(len), .. } if len != vocab => {
                return Err(Error::shape("mask", format!("[{vocab}]"), &[len]));
            }
            &Sets::Shared { given_as: GivenAs::Words(size), .. } if size != vocab => {
                return Err(Error::config("vocab_size of the words", vocab.to_string(), size));
            }
            Sets::Shared { ids, .. } => ids.iter().find(is_outside).map(u32::to_string),
            Sets::Each(lists) => lists.iter().enumerate().find_map(|(position, ids)| {
                ids.iter().find(is_outside).map(|id| format!("{id} at position {position}"))
            }),
        };
        match outside {
            Some(got) => Err(Error::config("allowed ids", format!("token ids below vocab_size {vocab}"), got)),
            None => Ok(()),
        }
    }

    /// Returns an error if the sets are lists and their number is not that of the positions.
    pub(super) fn check_positions(&self, positions: usize) -> Result<()> {
        match &self.sets {
            Sets::Each(lists) if lists.len() != positions => {
                Err(Error::config("allowed ids", format!("a list for each of {positions} positions"), lists.len()))
            }
            _ => Ok(()),
        }
    }

    /// Selects the sets of some of the positions.
    pub(super) fn select(&self, positions: &[u32]) -> Self {
        let sets = match &self.sets {
            Sets::Shared { .. } => self.sets.clone(),
            Sets::Each(lists) => {
                Sets::Each(IdLists::new(positions.iter().map(|&position| lists.list(position as usize).to_vec())))
            }
        };
        AllowedIds { sets, ..*self }
    }

    /// Returns the restriction at these positions. `required` are `n` ids for each of them, its target or its
    /// candidates: they must be in its set, or are added to it if [`AllowedIds::with_targets_added`] says so. All ids
    /// are below `vocab`; if the sets are lists, there is one for each position of the mixture.
    ///
    /// # Errors
    ///
    /// [`Error::EmptySet`] and [`Error::NotAllowed`].
    pub(super) fn restriction(
        &self,
        required: &[usize],
        n: usize,
        positions: impl Iterator<Item = usize>,
        vocab: usize,
    ) -> Result<Restriction> {
        if let Sets::Shared { ids, .. } = &self.sets {
            let are_in_set = || required.iter().all(|&id| ids.binary_search(&(id as u32)).is_ok());
            match ids.len() {
                0 if self.empty_as_full => return Ok(Restriction::All),
                len if len == vocab => return Ok(Restriction::All),
                1.. if are_in_set() => return Ok(Restriction::Shared(ids.clone())),
                _ => {}
            }
        }
        let list = |(i, position): (usize, usize)| {
            let required = &required[i * n..(i + 1) * n];
            let ids = match &self.sets {
                Sets::Shared { ids, .. } => ids,
                Sets::Each(lists) => lists.list(position),
            };
            if ids.is_empty() {
                return if self.empty_as_full {
                    Ok((0..vocab as u32).collect())
                } else {
                    Err(Error::EmptySet { position })
                };
            }
            let is_outside = |id: &u32| ids.binary_search(id).is_err();
            let outside: Vec<u32> = required.iter().map(|&id| id as u32).filter(is_outside).collect();
            match outside.first() {
                Some(&id) if !self.targets_added => Err(Error::NotAllowed { position, got: id.into() }),
                _ => Ok([ids, &outside].concat()),
            }
        };
        Ok(Restriction::Each(IdLists::new(positions.enumerate().map(list).collect::<Result<Vec<_>>>()?)))
    }
}
