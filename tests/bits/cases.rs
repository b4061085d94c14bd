//! The lines of all cases.

use candle_core::{DType, Device};
use mos_head::Result;

use super::digest::Digest;
use super::options::{joined, Head, LossOption};
use super::problem::{Problem, Sizes, BASE};

pub(crate) const CPU: Device = Device::Cpu;
pub(crate) const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// The lines of the cases.
pub(crate) struct Cases(pub(crate) Vec<String>);

impl Cases {
    /// One line.
    pub(crate) fn run(
        &mut self,
        name: &str,
        head: Head,
        sizes: Sizes,
        dtype: DType,
        case: impl FnOnce(&mut Problem, &mut Digest) -> Result<()>,
    ) {
        let (name, mut digest) = (format!("{name}/{}/{}", head.name(), dtype.as_str()), Digest::new());
        let done = Problem::new(head, sizes, dtype).and_then(|mut problem| case(&mut problem, &mut digest));
        done.unwrap_or_else(|error| panic!("{name}: {error}"));
        self.0.push(format!("{name} {:016x}\n", digest.0));
    }

    /// One line for each set of options.
    pub(crate) fn losses(&mut self, name: &str, head: Head, dtype: DType, sets: &[&[LossOption]]) {
        for options in sets {
            let name = format!("{name}/{}", joined(options));
            self.run(&name, head, BASE, dtype, |problem, digest| problem.losses(&[options], digest));
        }
    }
}
