//! What a person reads when a command fails: what, why, and what to do.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Who has to act; its number is the process's exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// Arguments, files, permissions.
    User = 1,
    /// A server did not answer or said no.
    Cluster = 2,
}

/// A failed command.
#[derive(Debug)]
pub struct Failure {
    blame: Blame,
    what: String,
    causes: Vec<String>,
    fix: Option<String>,
}

impl Failure {
    /// The user can fix it.
    pub fn user(what: impl Into<String>) -> Failure {
        Failure { blame: Blame::User, what: what.into(), causes: Vec::new(), fix: None }
    }

    /// The cluster is in the way.
    pub fn cluster(what: impl Into<String>) -> Failure {
        Failure { blame: Blame::Cluster, ..Failure::user(what) }
    }

    /// The same, whoever has to act: for commands that give exit code 1 a meaning of their own.
    #[must_use]
    pub fn of_cluster(self) -> Failure {
        Failure { blame: Blame::Cluster, ..self }
    }

    /// Adds an error and its chain of sources.
    #[must_use]
    pub fn because(mut self, error: &dyn Error) -> Failure {
        let mut next = Some(error);
        while let Some(error) = next {
            let text = error.to_string();
            // A transparent wrapper says the same as what it wraps.
            if self.causes.last() != Some(&text) {
                self.causes.push(text);
            }
            next = error.source();
        }
        self
    }

    /// Adds what to do.
    #[must_use]
    pub fn fix(mut self, fix: impl Into<String>) -> Failure {
        self.fix = Some(fix.into());
        self
    }

    /// What went wrong, in a line.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.blame as u8)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.what)?;
        for cause in &self.causes {
            write!(f, "\ncause: {cause}")?;
        }
        if let Some(fix) = &self.fix {
            write!(f, "\n  fix: {fix}")?;
        }
        Ok(())
    }
}

/// What commands return.
pub type Outcome<T = ()> = Result<T, Failure>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_of_causes_is_printed_once() {
        let inner = std::io::Error::new(std::io::ErrorKind::NotFound, "no such thing");
        let failure = Failure::user("cannot read x").because(&inner).fix("make x");
        let text = "error: cannot read x\ncause: no such thing\n  fix: make x";
        assert_eq!(failure.to_string(), text);
    }
}
