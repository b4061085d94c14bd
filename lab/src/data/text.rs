//! Texts as token ids: whitespace-separated files, their vocabulary, and their entropy if it is known.

use super::dataset::Data;
use crate::Result;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The token that ends each sentence.
pub const END_OF_SENTENCE: &str = "<eos>";
const UNKNOWN: &str = "<unk>";

/// Texts as token ids. The first token of every text is an input only; all others are targets.
pub struct Corpus {
    /// The texts to train on and to evaluate.
    pub data: Data<u32>,
    /// The words, by token id.
    pub words: Vec<String>,
    /// The text of `test.txt`, if there is one.
    pub test: Option<Vec<u32>>,
    /// Mean entropy of the true next-token distribution over the targets of `valid`, in nats.
    pub entropy: Option<f64>,
}

impl Corpus {
    /// Reads train.txt, valid.txt and, if it exists, test.txt: one sentence per line. In place of each of them there
    /// may be a folder of that name, `train`, `valid` or `test`, whose files are read in the order of their names. The
    /// vocabulary has all words, or as many of those that occur most in training as `most` says, `<unk>` and `<eos>`
    /// among them.
    pub fn from_folder(folder: &Path, most: Option<usize>) -> Result<Self> {
        let train = files(folder, "train")?.ok_or_else(|| missing(folder, "train"))?;
        let valid = files(folder, "valid")?.ok_or_else(|| missing(folder, "valid"))?;
        let mut vocabulary = match most {
            Some(most) => Vocabulary::most_frequent(&train, most)?,
            None => Vocabulary::default(),
        };
        let train = vocabulary.encode_files(&train, most.is_none())?;
        let valid = vocabulary.encode_files(&valid, false)?;
        let test = files(folder, "test")?.map(|files| vocabulary.encode_files(&files, false)).transpose()?;
        for (text, name) in [(Some(&train), "train"), (Some(&valid), "valid"), (test.as_ref(), "test")] {
            if text.is_some_and(|text| text.len() < 2) {
                return Err(format!("{} is empty", folder.join(name).with_extension("txt").display()).into());
            }
        }
        let name = folder.display().to_string();
        let words = vocabulary.words;
        Ok(Self { data: Data::new(name, &words, train, valid), words, test, entropy: None })
    }

    /// Returns the same texts with ids in the order of falling frequency in the training text.
    pub fn by_frequency(self) -> Self {
        let mut counts = vec![0usize; self.words.len()];
        self.data.train.iter().for_each(|&id| counts[id as usize] += 1);
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|&id| Reverse(counts[id]));
        let mut ranks = vec![0u32; order.len()];
        order.iter().zip(0..).for_each(|(&id, rank)| ranks[id] = rank);
        let renumbered = |text: Vec<u32>| text.into_iter().map(|id| ranks[id as usize]).collect::<Vec<_>>();
        let words: Vec<String> = order.iter().map(|&id| self.words[id].clone()).collect();
        let Data { name, train, valid, .. } = self.data;
        let data = Data::new(name, &words, renumbered(train), renumbered(valid));
        Corpus { data, words, test: self.test.map(renumbered), entropy: self.entropy }
    }

    /// Token ids as readable text, one sentence per line.
    pub fn decode(&self, ids: &[u32]) -> String {
        let words = ids.iter().map(|&id| self.words[id as usize].as_str());
        let lines = words.collect::<Vec<_>>().join(" ").replace(&format!(" {END_OF_SENTENCE} "), "\n");
        lines.trim_end_matches(END_OF_SENTENCE).trim().to_owned()
    }
}

/// Returns the file NAME.txt, or the files of the folder NAME; `None` if there is neither.
fn files(folder: &Path, name: &str) -> Result<Option<Vec<PathBuf>>> {
    let (file, parts) = (folder.join(name).with_extension("txt"), folder.join(name));
    if file.exists() || !parts.is_dir() {
        return Ok(file.exists().then(|| vec![file]));
    }
    let unreadable = |error| format!("cannot read {}: {error}", parts.display());
    let entries = std::fs::read_dir(&parts).map_err(unreadable)?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>().map_err(unreadable)?;
    files.retain(|path| path.is_file());
    files.sort();
    Ok(Some(files))
}

fn missing(folder: &Path, name: &str) -> String {
    format!("cannot read {}: neither this file nor a folder {name}", folder.join(name).with_extension("txt").display())
}

/// Reads a text file.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()).into())
}

/// Words in the order of their first occurrence, as in the released code of the mixture of softmaxes; or of falling
/// frequency, if there are only the most frequent.
#[derive(Default)]
struct Vocabulary {
    words: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// Returns the words that occur most in these files, `most` of them with `<unk>` and `<eos>`; of words that occur
    /// equally often, those that occur first.
    fn most_frequent(files: &[PathBuf], most: usize) -> Result<Self> {
        let mut counts = HashMap::<String, (u64, usize)>::new();
        for file in files {
            for line in read(file)?.lines() {
                for word in line.split_whitespace().chain([END_OF_SENTENCE]) {
                    let first = counts.len();
                    match counts.get_mut(word) {
                        Some((count, _)) => *count += 1,
                        None => drop(counts.insert(word.to_owned(), (1, first))),
                    }
                }
            }
        }
        let first = counts.len();
        counts.entry(UNKNOWN.into()).or_insert((0, first));
        let mut counts: Vec<(String, (u64, usize))> = counts.into_iter().collect();
        let is_special = |word: &str| [UNKNOWN, END_OF_SENTENCE].contains(&word);
        counts.sort_by_key(|(word, (count, first))| (!is_special(word), Reverse(*count), *first));
        counts.truncate(most.max(2));
        counts.sort_by_key(|(_, (count, first))| (Reverse(*count), *first));
        let mut vocabulary = Self::default();
        for (word, _) in &counts {
            vocabulary.id(word, None);
        }
        Ok(vocabulary)
    }

    /// Returns the words of files, as one text.
    fn encode_files(&mut self, files: &[PathBuf], grow: bool) -> Result<Vec<u32>> {
        let mut ids = vec![];
        for file in files {
            let file_ids = self.encode(&read(file)?, grow);
            // One end of a sentence comes before the first file alone.
            ids.extend(file_ids.into_iter().skip(usize::from(!ids.is_empty())));
        }
        Ok(ids)
    }

    /// Returns the words of each line followed by `<eos>`, after one `<eos>` at the start. With `grow`, new words are
    /// added; without, they become `<unk>` if the vocabulary has it, and are added if not.
    fn encode(&mut self, text: &str, grow: bool) -> Vec<u32> {
        let unknown = if grow { None } else { self.ids.get(UNKNOWN).copied() };
        let words = text.lines().flat_map(|line| line.split_whitespace().chain([END_OF_SENTENCE]));
        let ids: Vec<u32> = words.map(|word| self.id(word, unknown)).collect();
        let start = self.ids.get(END_OF_SENTENCE).copied();
        start.into_iter().chain(ids).collect()
    }

    fn id(&mut self, word: &str, unknown: Option<u32>) -> u32 {
        if let Some(id) = self.ids.get(word).copied().or(unknown) {
            return id;
        }
        let id = self.words.len() as u32;
        self.words.push(word.to_owned());
        self.ids.insert(word.to_owned(), id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unseen_words_become_unk_where_train_has_it() {
        let mut vocabulary = Vocabulary::default();
        assert_eq!(vocabulary.encode("a <unk> a\nb", true), [2, 0, 1, 0, 2, 3, 2]);
        assert_eq!(vocabulary.encode("b c", false), [2, 3, 1, 2]);
    }

    #[test]
    fn unseen_words_are_added_where_train_has_no_unk() {
        let mut vocabulary = Vocabulary::default();
        vocabulary.encode("a b", true);
        assert_eq!(vocabulary.encode("b c", false), [2, 1, 3, 2]);
        assert_eq!(vocabulary.words, ["a", "b", "<eos>", "c"]);
    }

    #[test]
    fn ids_are_renumbered_by_frequency() {
        let words = ["a", "b", "c"].map(String::from);
        let data = Data::new("x".into(), &words, vec![0, 2, 2, 1, 2, 1], vec![0, 1]);
        let corpus = Corpus { data, words: words.to_vec(), test: Some(vec![2, 0]), entropy: None }.by_frequency();
        assert_eq!(corpus.words, ["c", "b", "a"]);
        assert_eq!((corpus.data.train, corpus.data.valid), (vec![2, 0, 0, 1, 0, 1], vec![2, 1]));
        assert_eq!(corpus.test, Some(vec![0, 2]));
    }

    #[test]
    fn a_folder_of_files_is_the_text_of_all_of_them() {
        let folder = std::env::temp_dir().join(format!("text_{}", std::process::id()));
        std::fs::create_dir_all(folder.join("train")).expect("creates");
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("writes");
        write("train/news-2", "b a\nd");
        write("train/news-1", "a b b\n");
        write("valid.txt", "a d\n");
        let all = Corpus::from_folder(&folder, None).expect("two texts");
        assert_eq!(all.decode(&all.data.train[1..]), "a b b\nb a\nd");
        assert_eq!((all.words.len(), all.data.train.len(), all.test.is_some()), (4, 10, false));

        // b and <eos> occur three times, a twice, d once.
        let most = Corpus::from_folder(&folder, Some(4)).expect("two texts");
        assert_eq!(most.words, ["b", "<eos>", "a", "<unk>"]);
        assert_eq!(most.data.train, [1, 2, 0, 0, 1, 0, 2, 1, 3, 1]);
        assert_eq!(most.data.valid, [1, 2, 3, 1]);
        std::fs::remove_dir_all(folder).expect("was just written");
    }

    #[test]
    fn a_missing_file_is_an_error_that_names_it() {
        let error = Corpus::from_folder(Path::new("no-such-folder"), None).err().expect("must fail").to_string();
        assert!(error.contains("train.txt"), "{error}");
    }
}
