//! Request and notification codes.

/// Declares the opcodes and the total conversion from the kernel's number.
macro_rules! opcodes {
    ($( $name:ident = $code:literal, )*) => {
        /// What a request asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Opcode { $( $name, )* }

        impl Opcode {
            /// `None` for a code that this crate does not know; it is answered ENOSYS.
            pub(crate) fn from_code(code: u32) -> Option<Opcode> {
                match code {
                    $( $code => Some(Opcode::$name), )*
                    _ => None,
                }
            }

            /// The kernel's number.
            pub(crate) fn code(self) -> u32 {
                match self { $( Opcode::$name => $code, )* }
            }
        }
    };
}

opcodes! {
    Lookup = 1,
    Forget = 2,
    Getattr = 3,
    Setattr = 4,
    Readlink = 5,
    Symlink = 6,
    Mknod = 8,
    Mkdir = 9,
    Unlink = 10,
    Rmdir = 11,
    Rename = 12,
    Link = 13,
    Open = 14,
    Read = 15,
    Write = 16,
    Statfs = 17,
    Release = 18,
    Fsync = 20,
    Setxattr = 21,
    Getxattr = 22,
    Listxattr = 23,
    Removexattr = 24,
    Flush = 25,
    Init = 26,
    Opendir = 27,
    Readdir = 28,
    Releasedir = 29,
    Fsyncdir = 30,
    Getlk = 31,
    Setlk = 32,
    Setlkw = 33,
    Access = 34,
    Create = 35,
    Interrupt = 36,
    Bmap = 37,
    Destroy = 38,
    Ioctl = 39,
    Poll = 40,
    NotifyReply = 41,
    BatchForget = 42,
    Fallocate = 43,
    Readdirplus = 44,
    Rename2 = 45,
    Lseek = 46,
    CopyFileRange = 47,
    Setupmapping = 48,
    Removemapping = 49,
    Syncfs = 50,
    Tmpfile = 51,
    Statx = 52,
    CopyFileRange64 = 53,
}

/// Notification codes; they travel in the error field of a message with unique 0.
pub(crate) mod notify {
    pub(crate) const POLL: i32 = 1;
    pub(crate) const INVAL_INODE: i32 = 2;
    pub(crate) const INVAL_ENTRY: i32 = 3;
    pub(crate) const STORE: i32 = 4;
    pub(crate) const RETRIEVE: i32 = 5;
    pub(crate) const DELETE: i32 = 6;
    pub(crate) const RESEND: i32 = 7;
    pub(crate) const INC_EPOCH: i32 = 8;
    pub(crate) const PRUNE: i32 = 9;
}

#[cfg(test)]
mod tests {
    use super::Opcode;

    #[test]
    fn every_code_converts_both_ways_and_gaps_are_unknown() {
        let known: Vec<u32> = (0..64).filter(|code| Opcode::from_code(*code).is_some()).collect();
        for code in &known {
            assert_eq!(Opcode::from_code(*code).map(Opcode::code), Some(*code));
        }
        assert_eq!(known.len(), 51, "7, 19 and everything above 53 are gaps");
        for gap in [0, 7, 19, 54, 4096, u32::MAX] {
            assert_eq!(Opcode::from_code(gap), None, "{gap}");
        }
    }
}
