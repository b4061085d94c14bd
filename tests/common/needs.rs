//! What a test needs and not every machine has. A test that lacks it says so in a line on the terminal and passes, or
//! fails if an environment variable demands it: `MOS_HEAD_NEED_CXX=1`, and so on.
// Every test binary uses only some of it.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write;
use std::sync::Mutex;

/// Something that a test needs, and the environment variable that demands it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) name: &'static str,
    pub(crate) variable: &'static str,
}

/// It compiles the kernels of GPUs for the host.
pub(crate) const CXX: Need = Need { name: "C++ compiler", variable: "MOS_HEAD_NEED_CXX" };
/// It checks the rules of Metal's language.
pub(crate) const CLANG: Need = Need { name: "clang", variable: "MOS_HEAD_NEED_CLANG" };
/// Tests that run on each device run on it too.
pub(crate) const GPU: Need = Need { name: "GPU", variable: "MOS_HEAD_NEED_GPU" };
/// Its processes are ranks of one test.
pub(crate) const MPI: Need = Need { name: "MPI", variable: "MOS_HEAD_NEED_MPI" };
/// It shows faults, and injects errors, that a GPU's driver does not. `scripts/check-cuda-on-linux.sh` demands it.
pub(crate) const EMULATED_DRIVER: Need = Need { name: "emulated driver", variable: "MOS_HEAD_NEED_EMULATED_DRIVER" };
/// It is compared with its emulation.
pub(crate) const AMX: Need = Need { name: "Intel AMX", variable: "MOS_HEAD_NEED_AMX" };

impl Need {
    /// Says that this test is skipped because the machine lacks what it needs, and why it does.
    ///
    /// # Panics
    ///
    /// If the environment variable demands it.
    pub(crate) fn is_missing(self, reason: impl Display) {
        self.is_missing_for(std::thread::current().name().unwrap_or("a test"), reason);
    }

    /// Says that something of this name is skipped, as [`Need::is_missing`] does.
    pub(crate) fn is_missing_for(self, skipped: &str, reason: impl Display) {
        let is_demanded = std::env::var(self.variable).is_ok_and(|value| value == "1");
        match self.line(skipped, reason, is_demanded) {
            Ok(line) => say(line),
            Err(message) => panic!("{message}"),
        }
    }

    /// Returns the line of something that is skipped; the error is the message if it must not be.
    pub(crate) fn line(self, skipped: &str, reason: impl Display, is_demanded: bool) -> Result<String, String> {
        let Need { name, variable } = self;
        if is_demanded {
            return Err(format!("{skipped} needs what {variable}=1 demands: no {name} ({reason})"));
        }
        let reason = reason.to_string();
        let reason = reason.lines().next().unwrap_or_default();
        Ok(format!("skipped: {skipped}: no {name} ({reason}); {variable}=1 makes this an error"))
    }
}

/// Says that something is skipped which no environment variable can demand.
pub(crate) fn is_skipped(skipped: &str, reason: &str) {
    say(format!("skipped: {skipped}: {reason}"));
}

/// Prints a line once, to the terminal: the output of `eprintln` is kept from it if a test passes.
fn say(line: String) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().expect("a lock").insert(line.clone()) {
        let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
    }
}
