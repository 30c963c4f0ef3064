//! The only place where kernel structs become bytes and bytes become kernel structs.
#![allow(unsafe_code)]

/// A struct that is nothing but its bytes.
///
/// # Safety
///
/// The type is `repr(C)`, has no padding byte, and every bit pattern is a valid value. The
/// [`plain!`] macro proves the first two and only accepts integers, arrays of them and other
/// `Plain` structs as fields, which gives the third.
pub(crate) unsafe trait Plain: Copy + Sized + 'static {
    /// The bytes as the kernel expects them.
    fn as_bytes(&self) -> &[u8] {
        let start = std::ptr::from_ref(self).cast::<u8>();
        // SAFETY: `Plain` has no padding, so all `size_of::<Self>()` bytes are initialised, and
        // the slice borrows `self`.
        unsafe { std::slice::from_raw_parts(start, size_of::<Self>()) }
    }

    /// Copies a value out of the first bytes; `None` when there are too few. Any alignment.
    fn read_prefix(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..size_of::<Self>())?;
        // SAFETY: the slice has `size_of::<Self>()` bytes, `read_unaligned` asks for no alignment,
        // and every bit pattern is a valid `Plain`.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}

/// Marks the types that may be a field of a `plain!` struct.
pub(crate) trait PlainField {}
impl PlainField for u8 {}
impl PlainField for u16 {}
impl PlainField for u32 {}
impl PlainField for i32 {}
impl PlainField for u64 {}
impl PlainField for i64 {}
impl<T: PlainField, const N: usize> PlainField for [T; N] {}

/// Declares `repr(C)` structs with their size in bytes, and proves size and absence of padding.
macro_rules! plain {
    ($( $(#[$meta:meta])* struct $name:ident = $size:literal { $( $field:ident : $type:ty, )* } )*) => { $(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct $name { $( pub(crate) $field: $type, )* }

        const _: () = {
            assert!(size_of::<$name>() == $size, "size differs from the kernel's");
            assert!(0 $( + size_of::<$type>() )* == $size, "struct has padding");
            const fn is_plain<T: $crate::abi::plain::PlainField>() {}
            $( is_plain::<$type>(); )*
        };

        impl $crate::abi::plain::PlainField for $name {}
        // SAFETY: `repr(C)`; the assertions above prove that there is no padding and that the
        // fields are plain themselves.
        #[allow(unsafe_code)]
        unsafe impl $crate::abi::plain::Plain for $name {}
    )* };
}
pub(crate) use plain;

#[cfg(test)]
mod tests {
    use super::Plain;

    plain! {
        struct Pair = 16 { first: u64, second: u32, third: [u16; 2], }
    }

    #[test]
    fn bytes_make_a_round_trip_at_any_alignment() {
        let pair = Pair { first: 0x0102_0304_0506_0708, second: 9, third: [10, 11] };
        let mut bytes = vec![0xff];
        bytes.extend_from_slice(pair.as_bytes());
        assert_eq!(Pair::read_prefix(&bytes[1..]), Some(pair));
    }

    #[test]
    fn too_few_bytes_give_nothing() {
        for length in 0..16 {
            assert_eq!(Pair::read_prefix(&vec![0; length]), None, "{length}");
        }
    }
}
